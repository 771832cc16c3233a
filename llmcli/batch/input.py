"""The input: one prompt a line, as our own JSON object, as OpenAI's batch form, or as plain text.

Refuses a key that is unknown, or given twice, by name; a null counts as a key that is not given. Finds every problem of
the file.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from llmcli.differences import refuse_unknown, shown
from llmcli.errors import UsageError
from llmcli.openai_body import drop_idle, read_messages, read_template_kwargs, text_of
from llmcli.reading import LoneSurrogateError, object_of_unique_keys, parse_json
from llmcli.sampling.params import SPECS, check_param, read_logit_bias
from llmcli.schema.constraint import CONSTRAINT_KEYS, Constraint, constraint_of, constraint_of_format
from llmcli.tools import TOOL_KEYS, Tools, read_tools

# Reads JSON Lines as a stream of bounded lines, so that a file of gigabytes takes the memory of one line.
#
# Keeps a digest of everything read. The meaning of a line is decided below.

MAX_LINE_BYTES = 64 * 1024**2  # far more than any context; stops a file without line breaks
_BOM = b"\xef\xbb\xbf"


class LineReader:
    """The lines of a file; iterate once. `name` is the file for messages.

    `num_bytes` and `digest` cover what has been read so far.
    """

    def __init__(self, file: BinaryIO, name: str, max_line_bytes: int = MAX_LINE_BYTES):
        self.name = name
        self.num_bytes = 0
        self._file = file
        self._max_line_bytes = max_line_bytes
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of what has been read, in hexadecimal."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line's number, from 1, and its bytes without line end or leading byte order mark.

        Raises: UsageError for a line that is too long, or if the file cannot be read.
        """
        number = 0
        while line := self._read_line():
            number += 1
            if len(line) > self._max_line_bytes:
                raise UsageError(
                    f"{self.name} line {number} is longer than {self._max_line_bytes // 1024**2} MiB; "
                    "write one prompt per line"
                )
            self.num_bytes += len(line)
            self._hash.update(line)
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, content.removeprefix(_BOM) if number == 1 else content

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(self._max_line_bytes + 1)
        except OSError as error:
            raise UsageError(f"{self.name} cannot be read: {error.strerror}") from error


# `Line`, one prompt of a batch, and the checks of single values for all forms of a line.

Form = Literal["native", "chat", "completion"]  # the last two are OpenAI's
LineId = str | int | float

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt. `number` counts the lines of the file from 1. Either `prompt` or `messages` is given.

    None or an empty value means not given: the run's setting holds. The answer has the form `form`.
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
    constraint: Constraint | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None


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
    """The value, which must be a string or a list of strings, none of them empty."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{key} is {shown(value)}, expected a string or a list of strings, none of them empty")
    return tuple(texts)


# Lines in the form of OpenAI's batch files. Refuses what this program does not support, by the key's name.

URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
OPENAI_KEYS = ("custom_id", "method", "url", "body")
TEMPLATE_KWARGS = "chat_template_kwargs"
BODY_KEYS = ("model", "max_tokens", "max_completion_tokens", "seed", "stop", "logit_bias", "n", "response_format")


def parse_openai(values: dict[str, Any], number: int, model_names: tuple[str, ...]) -> Line:
    """One line; a null in the body counts as a key that is not given.

    Raises: UsageError that names the key and what is expected.
    """
    refuse_unknown(values, OPENAI_KEYS)
    for key in OPENAI_KEYS:
        if key not in values:
            raise UsageError(f"{key} is missing, expected {', '.join(OPENAI_KEYS)}")
    if values["method"] != "POST":
        raise UsageError(f"method is {shown(values['method'])}, expected 'POST'")
    form = URLS.get(values["url"]) if isinstance(values["url"], str) else None
    if form is None:
        raise UsageError(f"url is {shown(values['url'])}, expected {' or '.join(URLS)}")
    if not isinstance(values["body"], dict):
        raise UsageError(f"body is {shown(values['body'])}, expected an object")
    prompt_key = "messages" if form == "chat" else "prompt"
    of_chat = ("messages", TEMPLATE_KWARGS, *TOOL_KEYS) if form == "chat" else ("prompt",)
    asked = drop_idle(values["body"], (*of_chat, *BODY_KEYS, *SPECS), "body.")
    body = {f"body.{key}": value for key, value in asked.items()}
    if f"body.{prompt_key}" not in body:
        raise UsageError(f"body.{prompt_key} is missing, and {values['url']} needs it")
    if (model := body.get("body.model")) is not None and model not in model_names:
        raise UsageError(
            f"body.model is {shown(model)}, expected {' or '.join(map(repr, dict.fromkeys(model_names)))}; "
            "name this run's model, or leave the key out"
        )
    if body.get("body.n", 1) != 1 or isinstance(body.get("body.n"), bool):
        raise UsageError(f"body.n is {shown(body['body.n'])}, expected 1; write one line for each text")
    return Line(
        number,
        text_of("custom_id", values["custom_id"]),
        prompt=text_of("body.prompt", body["body.prompt"]) if form == "completion" else None,
        messages=read_messages("body.messages", body["body.messages"]) if form == "chat" else None,
        template_kwargs=read_template_kwargs(f"body.{TEMPLATE_KWARGS}", body.get(f"body.{TEMPLATE_KWARGS}", {})),
        tools=read_tools(asked, "body.") if form == "chat" else None,
        seed=seed_of("body.seed", body["body.seed"]) if "body.seed" in body else None,
        max_new_tokens=_max_new_tokens(body),
        stop=stop_of("body.stop", body["body.stop"]) if body.get("body.stop", []) != [] else (),
        sampling={name: check_param(name, body[f"body.{name}"]) for name in SPECS if f"body.{name}" in body},
        logit_bias=_logit_bias(body.get("body.logit_bias", {})),
        form=form,
        constraint=constraint_of_format("body.response_format", body.get("body.response_format")),
    )


def _max_new_tokens(body: Mapping[str, Any]) -> int | None:
    given = [key for key in ("body.max_tokens", "body.max_completion_tokens") if key in body]
    if len(given) == 2:
        raise UsageError(f"{given[0]} and {given[1]} set the same limit; give one of them")
    return integer_of(given[0], body[given[0]], 1) if given else None


def _logit_bias(value: Any) -> dict[int, float]:
    try:
        return read_logit_bias(value)
    except ValueError as error:
        raise UsageError(f"body.logit_bias is {error}") from None


_MESSAGE_KEYS = (TEMPLATE_KWARGS, *TOOL_KEYS)  # only with messages
KEYS = ("prompt", "messages", "id", "seed", "max_new_tokens", "stop", *_MESSAGE_KEYS, *CONSTRAINT_KEYS, *SPECS)
NUM_SHOWN_PROBLEMS = 10


@dataclass
class Problems:
    """The problems of a file: all are counted, and the first ten are kept for the user."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, number: int, problem: object) -> None:
        """Note a problem of a line."""
        self.count += 1
        if len(self.first) < NUM_SHOWN_PROBLEMS:
            self.first.append(f"{name} line {number}: {problem}")


def read_input(
    reader: LineReader,
    model_names: tuple[str, ...],
    problems: Problems,
    numbers: MutableMapping[LineId, int],
    *,
    is_text: bool,
) -> Iterator[Line]:
    """The prompts of a file. Bad lines are noted in `problems` and left out; empty lines are left out.

    `model_names` are the model's allowed names in OpenAI's form; `numbers` gets each id with the number of its line.
    Raises: UsageError for a file that cannot be read to its end.
    """
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
    if not value.keys().isdisjoint(OPENAI_KEYS):
        return parse_openai(value, number, model_names)
    return line_of(value, number)


def line_of(keys: Mapping[str, Any], number: int) -> Line:
    """A line from its keys in our own form. Raises: UsageError that names the key and what is expected."""
    refuse_unknown(keys, KEYS)
    values = {key: item for key, item in keys.items() if item is not None}
    if ("prompt" in values) == ("messages" in values):
        given = "prompt and messages are both given" if "prompt" in values else "prompt and messages are both missing"
        raise UsageError(f"{given}, expected one of them")
    if "messages" not in values and (lost := [key for key in _MESSAGE_KEYS if key in values]):
        raise UsageError(f"{lost[0]} needs messages")
    return Line(
        number,
        _id_of(values.get("id", number)),
        prompt=text_of("prompt", values["prompt"]) if "prompt" in values else None,
        messages=read_messages("messages", values["messages"], roles=None) if "messages" in values else None,
        template_kwargs=read_template_kwargs(TEMPLATE_KWARGS, values.get(TEMPLATE_KWARGS, {})),
        tools=read_tools(values),
        seed=seed_of("seed", values["seed"]) if "seed" in values else None,
        max_new_tokens=integer_of("max_new_tokens", values["max_new_tokens"], 1)
        if "max_new_tokens" in values
        else None,
        stop=stop_of("stop", values["stop"]) if "stop" in values else (),
        sampling={name: check_param(name, values[name]) for name in SPECS if name in values},
        constraint=constraint_of(values),
    )


def _id_of(value: Any) -> LineId:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not is_number:
        raise UsageError(f"id is {shown(value)}, expected a string or a number")
    return value  # type: ignore[no-any-return]


def _text_hint(text: str) -> str:
    """Suggests another option if the line is plainly not meant as JSON."""
    is_json = text.lstrip()[:1] in ("{", "[", '"')
    return "" if is_json else f"; if each line is a prompt, as {json.dumps(text[:20])} seems to be, add --text"
