"""Dataclasses as JSON, both ways: the annotations are the schema. Refuses values that do not fit, by their key.

Supported: strings, numbers, booleans, None, `tuple`, `Mapping[str, ...]`, `Literal`, `X | None`, dataclasses, and types
annotated with a `Range` or a `StringForm`. A field with a default may be missing. -inf is written as the string
"-inf", since JSON has no infinities.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from llmcli.differences import shown

_MINUS_INFINITY = "-inf"
_WORDS = {str: "a string", int: "an integer", bool: "true or false"}


class MalformedError(Exception):
    """A value that does not fit its key; the message names both."""


@dataclass(frozen=True)
class Range:
    """Annotates `int`: the smallest and the largest value."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"an integer from {self.minimum} to {self.maximum}"

    def contains(self, value: Any) -> bool:
        """Whether a value is such a number."""
        return type(value) is int and self.minimum <= value <= self.maximum


@dataclass(frozen=True)
class StringForm:
    """Annotates `str`: a pattern that the whole string matches, and its description."""

    pattern: str
    words: str

    def __str__(self) -> str:
        return self.words

    def contains(self, value: Any) -> bool:
        """Whether a value is such a string."""
        return isinstance(value, str) and re.fullmatch(self.pattern, value, re.ASCII) is not None


def to_json(value: Any) -> Any:
    """A dataclass, or a value in one, in a form for `json.dumps`."""
    if is_dataclass(value):
        values = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        # Leave out values equal to their default, so that programs that know an older form read a newer file.
        return {name: to_json(item) for name, (item, default) in values.items() if item != default}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        if all(type(item) is int for item in value):  # token ids may be millions
            return list(value)
        return [to_json(item) for item in value]
    return _MINUS_INFINITY if value == -math.inf else value


def from_json(kind: Any, value: Any, name: str = "") -> Any:
    """A value of type `kind` from JSON; `name` is the path to it, such as `samples[0].text`.

    Raises: MalformedError.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, name)
    if origin is Annotated:
        limit = arguments[1]
        return value if limit.contains(value) else _refuse(name, value, limit)
    if origin in (Union, UnionType):
        (wanted,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else from_json(wanted, value, name)
    if origin is Literal:
        is_one = isinstance(value, str) and value in arguments
        return value if is_one else _refuse(name, value, f"one of {', '.join(arguments)}")
    if origin is tuple:
        return _read_tuple(arguments, value, name)
    if origin is Mapping:
        if not isinstance(value, dict):
            _refuse(name, value, "an object")
        return {key: from_json(arguments[1], item, f"{name}.{key:.60}") for key, item in value.items()}
    if kind is float:
        return _read_float(value, name)
    return value if type(value) is kind else _refuse(name, value, _WORDS[kind])


def _read_dataclass(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        _refuse(name, value, "an object")
    prefix = f"{name}." if name else ""
    hints = _hints(kind)
    if unknown := [key for key in value if key not in hints]:
        raise MalformedError(f"{prefix}{unknown[0]:.60} is an unknown key, expected {', '.join(hints)}")
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [key for key in needed if key not in value]:
        raise MalformedError(f"{prefix}{missing[0]} is missing")
    return kind(**{key: from_json(hints[key], item, f"{prefix}{key}") for key, item in value.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read_tuple(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _refuse(name, value, "a list")
    if kinds[-1] is Ellipsis:
        limit = next(iter(getattr(kinds[0], "__metadata__", ())), None)
        if limit is not None and all(map(limit.contains, value)):  # token ids may be millions
            return tuple(value)
        kinds = (kinds[0],) * len(value)
    elif len(value) != len(kinds):
        _refuse(name, value, f"a list of {len(kinds)}")
    return tuple(
        from_json(kind, item, f"{name}[{index}]") for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _read_float(value: Any, name: str) -> int | float:
    """A finite number as written, or -inf."""
    if value == _MINUS_INFINITY:
        return -math.inf
    is_number = type(value) in (int, float) and math.isfinite(value)
    if not is_number:
        _refuse(name, value, f'a finite number or "{_MINUS_INFINITY}"')
    number: int | float = value
    return number


def _refuse(name: str, value: Any, expected: object) -> NoReturn:
    raise MalformedError(f"{name or 'the file'} is {shown(value)}, expected {expected}")
