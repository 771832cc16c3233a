"""Typed reads from a config.json object: a wrong value is named with its key, its file and what was expected."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from llmcli.errors import CheckpointError

Item = TypeVar("Item")

_REQUIRED: Any = object()


class Fields:
    """Reads values by key and type from one JSON object.

    A key that is missing or null takes the default; without a default it is an error.
    Raises: CheckpointError for a missing required key, a wrong type or a value out of range.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def _read(self, key: str, default: Any, expected: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key} is missing, expected {expected}")
        return default

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {value!r}, expected {expected}")

    def positive_int(self, key: str, default: Any = _REQUIRED) -> int:
        """An integer of at least 1."""
        value = self._read(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def positive_float(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self._read(key, default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._read(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._read(key, default, "a string")
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty when the key is absent."""
        value = self._read(key, {}, "an object")
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, as bos_token_id and eos_token_id are written; empty when absent."""
        value = self._read(key, [], "a token id or a list of them")
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def int_list(self, key: str, default: list[int]) -> list[int]:
        """A list of integers."""
        return self._list(key, default, int, "a list of integers")

    def string_list(self, key: str, default: list[str]) -> list[str]:
        """A list of strings."""
        return self._list(key, default, str, "a list of strings")

    def _list(self, key: str, default: list[Item], kind: type[Item], expected: str) -> list[Item]:
        value = self._read(key, default, expected)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, value, expected)
        return value
