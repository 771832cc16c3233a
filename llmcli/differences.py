"""Compares settings by name, as JSON values: finds those that differ, and unknown ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from llmcli.errors import UsageError

_LONGEST_SHOWN = 80  # characters
_LONGEST_SHOWN_LIST = 8


@dataclass(frozen=True)
class Difference:
    """A setting whose value has changed; None stands for a missing one."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        then, now = self.then, self.now
        if isinstance(then, list) and isinstance(now, list) and max(len(then), len(now)) > _LONGEST_SHOWN_LIST:
            index = first_difference(then, now)
            return f"{self.name} has {len(then)} entries, now {len(now)}; they differ from entry {index + 1} on"
        old, new = ("unset" if value is None else shown(value) for value in (then, now))
        return f"{self.name} {old}, now {new}"


def find_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The settings that differ, in their order."""
    names = {**then, **now}
    return [Difference(name, then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)]


def first_difference(then: Sequence[Any], now: Sequence[Any]) -> int:
    """The index of the first entry that differs; if one is the beginning of the other, its length."""
    pairs = enumerate(zip(then, now, strict=False))
    return next((index for index, (old, new) in pairs if old != new), min(len(then), len(now)))


def shown(value: Any) -> str:
    """A value for a message, in JSON's words instead of Python's."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str = "") -> None:
    """Refuse a key that is not one of `known`; `where` is the path to the object, such as `body.`.

    Raises: UsageError.
    """
    for key in values:
        if key not in known:
            near = get_close_matches(key[:_LONGEST_SHOWN], known, n=1)
            rest = f"; did you mean {near[0]}?" if near else f", expected {', '.join(known)}"
            raise UsageError(f"unknown key {shown(where + key)}{rest}")
