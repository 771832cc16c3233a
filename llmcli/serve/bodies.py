"""The keys of a request: OpenAI's and our sampling parameters, as pydantic models.

A key that is unknown, or given twice, is refused by name, never ignored. A null counts as a key that is not given, and
so do OpenAI's other keys with values that ask for nothing.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag, ValidationError

from llmcli.differences import shown
from llmcli.errors import UsageError
from llmcli.openai_body import BodyError, drop_idle, read_messages, read_template_kwargs, unknown_key
from llmcli.patterns import child_program
from llmcli.reading import LoneSurrogateError, parse_json
from llmcli.sampling.params import SPECS, check_param, read_logit_bias
from llmcli.schema.constraint import CONSTRAINT_KEYS, Constraint, constraint_of, constraint_of_format
from llmcli.serve.refusal import Refusal
from llmcli.tools import TOOL_KEYS, Tools, read_tools

MAX_SAMPLES = 128
_MAX_SEED = 2**64 - 1
_MAX_STOPS = 64
_MAX_KEYS = 1000  # of an object with known keys
_MAX_OBJECTS = 100_000
_MAX_ENTRIES = 500_000  # of all lists and objects; more token ids fit no context
_UNKNOWN = "unknown_key"


class Body(BaseModel):
    """An object of JSON, without conversions: "1" is not a number."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_KEYS:  # pydantic would make an error for each
            raise ValueError(f"an object of {len(value)} keys, expected at most {_MAX_KEYS}")
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Turn an error of the engine's rooms into a refusal of the key `param`."""
    try:
        yield
    except BodyError as error:
        raise Refusal(400, str(error), param=error.key[:200], code=_UNKNOWN if error.is_unknown else None) from error
    except UsageError as error:
        raise Refusal(400, str(error), param=param) from error


def _read_messages(value: Any) -> Any:
    with refused("messages"):
        return read_messages("messages", value)


Messages = Annotated[Any, BeforeValidator(_read_messages)]


def _refuse_obfuscation(value: bool) -> bool:
    if value:
        raise ValueError("true, expected false, as pieces are not padded here")
    return value


class StreamOptions(Body):
    """What a stream reports besides the text: the numbers of tokens at its end, or with every piece."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, AfterValidator(_refuse_obfuscation)] = False


def _sampling_parameter(name: str) -> Any:
    def check(value: Any) -> Any:
        with refused(name):
            return check_param(name, value)

    return Annotated[Any, BeforeValidator(check)], None


Sampling = pydantic.create_model("Sampling", __base__=Body, **{name: _sampling_parameter(name) for name in SPECS})


_FIELDS = {"schema": "schema_"}  # keys whose field has another name


class TextsBody(Sampling):  # type: ignore[misc, valid-type]
    """Keys that both kinds of texts share. Defaults come from the server's flags, not from OpenAI."""

    model: str | None = None
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=_MAX_STOPS, fail_fast=True),
        BeforeValidator(_as_list),
    ] = []
    logit_bias: Annotated[Mapping[int, float], BeforeValidator(read_logit_bias)] = {}
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Any = None
    schema_: Any = Field(None, alias="schema")  # pydantic's models have a method `schema`
    json_output: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        with refused(""):
            return drop_idle(value, key_names(cls)) if isinstance(value, dict) else value

    @property
    def sampling(self) -> dict[str, int | float]:
        """The sampling parameters given."""
        return {name: value for name in SPECS if (value := getattr(self, name)) is not None}

    @pydantic.model_validator(mode="after")
    def _check_constraint(self) -> "TextsBody":
        _ = self.constraint
        if not self.stream and (self.includes_usage or self.counts_in_pieces):
            raise Refusal(400, 'stream_options needs "stream": true', param="stream_options")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The schema, expression, choices or grammar of the texts. Raises: Refusal for two of them or a bad one"""
        given: dict[str, Any] = {
            key: value for key in CONSTRAINT_KEYS if (value := getattr(self, _FIELDS.get(key, key))) is not None
        }
        by_format = self.format_constraint
        with refused(next(iter(given), "")):
            by_key = constraint_of(given)
        if by_format is not None and by_key is not None:
            key = by_format.key.partition(".")[0]
            raise Refusal(400, f"{key} and {by_key.key} cannot be combined", param=key)
        return by_key or by_format

    @property
    def format_constraint(self) -> Constraint | None:
        """What OpenAI's own key holds the texts to. Raises: Refusal for a bad one"""
        with refused("response_format"):
            return constraint_of_format("response_format", self.response_format)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_in_pieces(self) -> bool:
        """Whether each piece of a stream reports the numbers of tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of a text."""
        return self.max_tokens

    @property
    def num_alternatives(self) -> int | None:
        """How many other tokens to report for each position; None for no probabilities at all."""
        return None


def _read_template_kwargs(value: Any) -> Any:
    with refused("chat_template_kwargs"):
        return read_template_kwargs("chat_template_kwargs", value)


class ChatBody(TextsBody):
    """A body of /v1/chat/completions."""

    messages: Messages
    chat_template_kwargs: Annotated[Any, BeforeValidator(_read_template_kwargs)] = {}
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_contradictions(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "max_tokens and max_completion_tokens set the same limit; give one of them"
            raise Refusal(400, message, param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        _ = self.offered
        return self

    @property
    def offered(self) -> Tools | None:
        """The tools that the answer may call. Raises: Refusal for keys that are not in OpenAI's form"""
        with refused("tools"):
            return read_tools({key: getattr(self, key) for key in TOOL_KEYS})

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of a text."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_alternatives(self) -> int | None:
        """How many other tokens to report for each position; None for no probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def _form(value: Any) -> str:
    """Which of OpenAI's forms of a prompt it is, by its first entry; anything else counts as texts."""
    first = value[0] if isinstance(value, list) and value else None
    return "list[id]" if isinstance(first, int) else "list[ids]" if isinstance(first, list) else "list[text]"


class CompletionBody(TextsBody):
    """A body of /v1/completions."""

    prompt: Annotated[
        Annotated[list[str], Field(min_length=1, fail_fast=True), BeforeValidator(_as_list), Tag("list[text]")]
        | Annotated[TokenIds, Tag("list[id]")]
        | Annotated[list[TokenIds], Field(fail_fast=True), Tag("list[ids]")],
        Discriminator(_form),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_contradictions(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(400, "max_tokens is 0, expected >= 1, or echo: true", param="max_tokens")
        return self

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts; a flat list of token ids is one prompt."""
        is_one = isinstance(self.prompt[0], int)
        return cast("Sequence[str | Sequence[int]]", [self.prompt] if is_one else self.prompt)

    @property
    def num_alternatives(self) -> int | None:
        """How many other tokens to report for each position; None for no probabilities at all."""
        return self.logprobs


class TokenizeBody(Body):
    """A body of /tokenize, as in vLLM: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_contradictions(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            given = "missing" if self.prompt is None else "given"
            raise Refusal(400, f"prompt and messages are both {given}, expected one of them", param="prompt")
        return self


class DetokenizeBody(Body):
    """A body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


Kind = TypeVar("Kind", bound=Body)


def parse_body(kind: type[Kind], content: bytes) -> Kind:
    """The body of a request.

    The time depends on the body's length alone: a body with too many entries is not read, and the first fault ends it.

    Raises: Refusal that names the key and what is expected
    """
    if content.count(b",") >= _MAX_ENTRIES:  # also counts those within strings: texts have few
        raise Refusal(400, f"the body has more than {_MAX_ENTRIES} entries", code="too_many_entries")
    if content.count(b"{") + content.count(b"[") > _MAX_OBJECTS:  # each takes at least a hundred bytes
        raise Refusal(400, f"the body has more than {_MAX_OBJECTS} lists and objects", code="too_many_entries")
    try:
        value = parse_json(content, _object)
    except LoneSurrogateError as error:
        raise Refusal(400, str(error), param=error.place or None) from error
    except ValueError as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(400, f"the body is {shown(value)}, expected a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(kind, error) from error


def key_names(kind: type[Body]) -> list[str]:
    """The keys of a body."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        param = twice[:80].encode(errors="replace").decode()  # it may be invalid Unicode, which no answer can carry
        raise Refusal(400, f"the key {shown(twice)} appears twice; keep one of them", param=param)
    return values


def _refusal(kind: type[Body], error: ValidationError) -> Refusal:
    """The first fault, in our words."""
    problem = error.errors(include_url=False)[0]
    key = _path(problem["loc"]) or "the body"
    if problem["type"] == "extra_forbidden":
        known = key_names(kind) if len(problem["loc"]) == 1 else key_names(StreamOptions)
        unknown = unknown_key(str(problem["loc"][-1]), known, "stream_options." * (len(problem["loc"]) - 1))
        return Refusal(400, str(unknown), param=key, code=_UNKNOWN)
    if problem["type"] == "missing":
        return Refusal(400, f"{key} is missing", param=key)
    if problem["type"] == "value_error":  # ours, which says what was given
        return Refusal(400, f"{key} is {problem['ctx']['error']}", param=key)
    return Refusal(400, f"{key} is {shown(problem['input'])}, expected {_expected(problem)}", param=key)


_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "mapping_type": "an object",
    "too_short": "at least one entry",
    "string_too_short": "at least one character",
}


def _expected(problem: Any) -> str:
    """What pydantic expects, in our words."""
    context = problem.get("ctx", {})
    bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "max_length": "at most"}
    for name, words in bounds.items():
        if name in context:
            return f"{words} {context[name]}" + (" entries" if name == "max_length" else "")
    if "expected" in context:  # of a Literal
        return str(context["expected"])
    return _TYPES.get(problem["type"], str(problem["msg"]))


def _path(parts: Sequence[str | int]) -> str:
    """A place in a body, such as `messages[0].role`, without pydantic's names for the forms of a value."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("list[", "function-", "constrained-")):
            path += f".{part}" if path else part
    return path[:200]


# `BodyReader`: reads long bodies in a separate process.
#
# A thread of the front would compete with the event loop for Python's lock, which the loop releases at each system
# call: all clients would wait for a second. Garbage collection of what is read would stop both.

_PROGRAM = child_program("llmcli.serve.bodies", "main(int(sys.argv[1]))")


class BodyReader:
    """See above. For one thread at a time. The process ends with its parent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process now; else the first body waits for it."""
        self._connection, there = Pipe()
        with there:
            command = [sys.executable, "-P", "-c", _PROGRAM, str(there.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(there.fileno(),))

    def read(self, kind: type[Kind], content: bytes) -> Kind:
        """As `parse_body`. Raises: as it does; a Refusal if the process dies, and the next body starts a new one"""
        if self._connection is None:
            self.start()
        assert self._connection is not None
        try:
            self._connection.send((kind, content))
            body: Kind | Refusal = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise Refusal(500, "the body could not be read; send a shorter one") from error
        if isinstance(body, Refusal):
            try:
                raise body
            finally:
                del body  # else error, traceback and this frame would be a reference cycle, which keeps the content
        return body

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None


def main(link: int) -> None:
    """Read bodies until the other process closes the link."""
    with Connection(link) as connection:
        while True:
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                return
            try:
                answer: Body | Refusal = parse_body(kind, content)
            except Refusal as refusal:
                answer = refusal
            connection.send(answer)
