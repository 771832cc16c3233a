"""`Constraint`: what a batch line or a request asks texts to match, by our keys or by OpenAI's.

Imports no llguidance: most texts have no such request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmcli.differences import refuse_unknown, shown
from llmcli.errors import UsageError

ConstraintKind = Literal["schema", "json_output", "regex", "choice", "grammar", "tools"]

# Our keys, named as the options, and the type of each.
_EXPECTED: Mapping[ConstraintKind, str] = {
    "schema": "a JSON Schema, an object",
    "json_output": "true or false",
    "regex": "a string",
    "choice": "a list of strings",
    "grammar": "a string",
}
CONSTRAINT_KEYS = tuple(_EXPECTED)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The kind, and the `value` in the form of that kind's option, given under the key `key`.

    `tools` is no option: its value is that of `Offer.constraint_value`.
    """

    kind: ConstraintKind
    key: str
    value: Any


def constraint_of(values: Mapping[str, Any]) -> Constraint | None:
    """Read our keys among `values`. Raises: UsageError for two of them, and for a value of another type."""
    given = [kind for kind in _EXPECTED if kind in values]
    if values.get("json_output") is False:  # asks for nothing
        given.remove("json_output")
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} cannot be combined")
    for kind in given:
        value = values[kind]
        is_right = {
            "schema": isinstance(value, dict | bool),
            "json_output": isinstance(value, bool),
            "choice": isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value),
        }.get(kind, isinstance(value, str))
        if not is_right:
            raise UsageError(f"{kind} is {shown(value)}, expected {_EXPECTED[kind]}")
        return Constraint(kind, kind, value)
    return None


def constraint_of_format(key: str, value: Any) -> Constraint | None:
    """Read OpenAI's response_format, given under `key`; None counts as a key that is not given.

    A schema is followed exactly whether it is `strict` or not.
    Raises: UsageError for a value that is not a response_format.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise UsageError(f"{key} is {shown(value)}, expected an object of type text, json_object or json_schema")
    if value["type"] != "json_schema":
        refuse_unknown(value, ("type",), f"{key}.")
        return Constraint("schema", key, {"type": "object"}) if value["type"] == "json_object" else None
    refuse_unknown(value, ("type", "json_schema"), f"{key}.")
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise UsageError(f"{key}.json_schema is {shown(named)}, expected an object with name and schema")
    refuse_unknown(named, ("name", "description", "schema", "strict"), f"{key}.json_schema.")
    for name, kind, expected in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(named.get(name), kind | None):
            raise UsageError(f"{key}.json_schema.{name} is {shown(named[name])}, expected {expected}")
    return Constraint("schema", f"{key}.json_schema.schema", named["schema"])
