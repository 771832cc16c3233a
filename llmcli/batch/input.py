"""What comes in: one prompt a line, as an object of ours, as OpenAI's batch form, or as plain text.

Refuses a key that it does not know, or that is there twice, by name; a null counts as a key that is not there. Finds
every problem of the file.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llmcli.batch.lines import LineReader
from llmcli.batch.openai import is_openai, parse_openai
from llmcli.batch.values import (
    Line,
    LineId,
    integer_of,
    seed_of,
    stop_of,
    text_of,
)
from llmcli.differences import refuse_unknown, shown
from llmcli.errors import UsageError
from llmcli.openai_body import read_messages
from llmcli.reading import LoneSurrogateError, object_of_unique_keys, parse_json
from llmcli.sampling.params import SPECS, check_param
from llmcli.schema.held_to import HELD_KEYS, held_to_of

KEYS = ("prompt", "messages", "id", "seed", "max_new_tokens", "stop", *HELD_KEYS, *SPECS)
NUM_SHOWN_PROBLEMS = 10


@dataclass
class Problems:
    """What is wrong with a file: all of it is counted, and the first ten are kept for the user."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, number: int, problem: object) -> None:
        """Note a problem of one line."""
        self.count += 1
        if len(self.first) < NUM_SHOWN_PROBLEMS:
            self.first.append(f"{name} line {number}: {problem}")


def read_input(
    reader: LineReader, model_names: tuple[str, ...], problems: Problems, *, is_text: bool
) -> Iterator[Line]:
    """The prompts of a file. A line that is none is noted in `problems` and left out; an empty one is left out.

    `model_names` are the names that a line in OpenAI's form may call the model.
    Raises: UsageError for a file that cannot be read to its end.
    """
    numbers: dict[LineId, int] = {}
    for number, content in reader:
        try:
            line = parse_line(content, number, model_names, is_text=is_text)
            if line is None:
                continue
            first = numbers.setdefault(line.id, number)
            if first != number:
                raise UsageError(f"the id {shown(line.id)} is already used on line {first}; give each line its own id")
        except UsageError as error:
            problems.add(reader.name, number, error)
            continue
        yield line


def parse_line(content: bytes, number: int, model_names: tuple[str, ...] = (), *, is_text: bool = False) -> Line | None:
    """One line without its line end; None for an empty one.

    Raises: UsageError that names the key and what is expected.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: byte {content[error.start]:#04x} at {error.start}") from error
    if is_text:
        return Line(number, number, prompt=text) if text else None
    if not text.strip(" \t\r"):
        return None
    try:
        value = parse_json(text, object_of_unique_keys)
    except LoneSurrogateError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(f"not valid JSON: {error}{_text_hint(text)}") from error
    if not isinstance(value, dict):
        raise UsageError(f'{shown(value)} is not an object, expected one such as {{"prompt": "Once upon a time"}}')
    if is_openai(value):
        return parse_openai(value, number, model_names)
    refuse_unknown(value, KEYS)
    return _native({key: item for key, item in value.items() if item is not None}, number)


def _native(values: dict[str, Any], number: int) -> Line:
    if ("prompt" in values) == ("messages" in values):
        given = "prompt and messages are both given" if "prompt" in values else "prompt and messages are both missing"
        raise UsageError(f"{given}, expected one of them")
    return Line(
        number,
        _id_of(values.get("id", number)),
        prompt=text_of("prompt", values["prompt"]) if "prompt" in values else None,
        messages=read_messages("messages", values["messages"], roles=None) if "messages" in values else None,
        seed=seed_of("seed", values["seed"]) if "seed" in values else None,
        max_new_tokens=integer_of("max_new_tokens", values["max_new_tokens"], 1)
        if "max_new_tokens" in values
        else None,
        stop=stop_of("stop", values["stop"]) if "stop" in values else (),
        sampling={name: check_param(name, values[name]) for name in SPECS if name in values},
        held_to=held_to_of(values),
    )


def _id_of(value: Any) -> LineId:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not is_number:
        raise UsageError(f"id is {shown(value)}, expected a string or a number")
    return value  # type: ignore[no-any-return]


def _text_hint(text: str) -> str:
    """The way out where a line is plainly not meant as JSON."""
    is_json = text.lstrip()[:1] in ("{", "[", '"')
    return "" if is_json else f"; if each line is a prompt, as {json.dumps(text[:20])} seems to be, add --text"
