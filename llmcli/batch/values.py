"""`Line`, one prompt of a batch, and the checks of single values that every form of a line shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcli.differences import shown
from llmcli.errors import UsageError
from llmcli.schema.held_to import HeldTo

Form = Literal["native", "chat", "completion"]  # the last two are OpenAI's
LineId = str | int | float

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt. `number` counts the lines of the file from 1. Of `prompt` and `messages` one is there.

    What is None or empty was not given, and the run's settings hold. `form` is that of the answer.
    """

    number: int
    id: LineId
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    form: Form = "native"
    held_to: HeldTo | None = None


def text_of(key: str, value: Any) -> str:
    """The value, which must be a text."""
    if not isinstance(value, str):
        raise UsageError(f"{key} is {shown(value)}, expected a string")
    return value


def integer_of(key: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """The value, which must be an integer in the range."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and <= {maximum}"
        raise UsageError(f"{key} is {shown(value)}, expected an integer >= {minimum}{upper}")
    return int(value)


def seed_of(key: str, value: Any) -> int:
    """The value, which must be a seed."""
    return integer_of(key, value, 0, _MAX_SEED)


def stop_of(key: str, value: Any) -> tuple[str, ...]:
    """The value, which must be a text or a list of texts, none of them empty."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{key} is {shown(value)}, expected a string or a list of strings, none of them empty")
    return tuple(texts)
