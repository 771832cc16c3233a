"""Typed reads from a config.json object: a wrong value is named with its key, its file and what was expected."""

from collections.abc import Mapping
from typing import Any

from llmcli.errors import CheckpointError

MAX_INT = 2**31 - 1  # ids, positions and windows are 32-bit numbers on a card
FLOAT_RANGE = (1e-15, 1e15)  # float32 holds these numbers and the product of any two; real ones are far inside

_REQUIRED: Any = object()


class Fields:
    """Reads values by key and type from one JSON object, and collects what the user should know in `notes`.

    A key that is missing takes the default; without a default it is an error. Null is another matter: transformers
    refuses it for a number, a string and a boolean, and so does this class; for a list, an object and token ids null
    is as good as missing. Where a key has a null of its own meaning, its reader asks `is_null` first.
    Raises: CheckpointError for a missing required key, a wrong type or a value out of range.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where
        self.notes: list[str] = []

    def is_null(self, key: str) -> bool:
        """Whether the key is missing or null."""
        return self.values.get(key) is None

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error that says what a key holds, and what it should."""
        return CheckpointError(f"{self.where}: {key} is {shown(self.values[key])}, expected {expected}")

    def positive_int(self, key: str, default: Any = _REQUIRED, *, at_most: int = MAX_INT) -> int:
        """An integer from 1 to `at_most`."""
        value = self._read(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a positive integer")
        if value > at_most:
            raise self.wrong(key, f"at most {at_most}")
        return value

    def integer(self, key: str, default: int) -> int:
        """An integer of any sign, of at most 32 bits."""
        value = self._read(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INT:
            raise self.wrong(key, f"an integer of at most {MAX_INT}")
        return value

    def positive_float(self, key: str, default: Any = _REQUIRED) -> float:
        """A number above 0 with which float32 can compute."""
        value = self._read(key, default, "a positive number")
        low, high = FLOAT_RANGE
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, "a positive number")
        if not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number of any sign, zero included, with which float32 can compute; None where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        low, high = FLOAT_RANGE
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if value != 0 and not low <= abs(value) <= high:
            raise self.wrong(key, f"0 or a number from {low:g} to {high:g}, with or without a minus")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._read(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._read(key, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, as bos_token_id and eos_token_id are written; empty where there is none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ <= MAX_INT for id_ in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)

    def int_list(self, key: str, default: list[int]) -> list[int]:
        """A list of integers; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.wrong(key, "a list of integers")
        return value

    def string_list(self, key: str, default: list[str]) -> list[str]:
        """A list of strings; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return value

    def _read(self, key: str, default: Any, expected: str) -> Any:
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key} is missing, expected {expected}")
        return default


def shown(value: Any) -> str:
    """A value of a file as a message shows it: null as the file has it, and no more than fits on a line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
