"""Compares a command's JSON with its file in docs/schemas: every key is listed, and no more."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
UNKNOWN = {"another key": [["of no type that any schema has"]]}
Place = tuple[str | int, ...]
# Objects that are not ours: the quality card is a file of the model, and settings come from a receipt.
_OPEN = ("quality_card", "then", "now")


def check_docs_schema(name: str, value: Any) -> None:
    """The value fits; no object in it may have another key, and no listed key may be missing."""
    schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    validator.validate(value)
    for place in _objects(value):
        changed = copy.deepcopy(value)
        found = changed
        for step in place:
            found = found[step]
        found.update(UNKNOWN)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(changed)
    if isinstance(value, dict):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({})


def _objects(value: Any) -> Iterator[Place]:
    """The places of objects; in a list of similar ones, the first."""
    seen = set()
    for place in _all_objects(value, ()):
        kind = tuple("*" if isinstance(step, int) else step for step in place)
        if kind not in seen and not any(step in _OPEN for step in place):
            seen.add(kind)
            yield place


def _all_objects(value: Any, place: Place) -> Iterator[Place]:
    if isinstance(value, dict):
        yield place
        for key, inner in value.items():
            yield from _all_objects(inner, (*place, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _all_objects(inner, (*place, index))
