"""`Receipt`: everything that a text depended on, and the text; its file, and how a run differs from it.

Two runs with the same settings on the same machine have equal receipts, so a receipt holds no time.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from llmcli.differences import Difference, find_differences, first_difference, shown
from llmcli.errors import UsageError
from llmcli.reading import RECEIPT
from llmcli.writing import OutputFile

# Dataclasses as JSON, both ways: the annotations are the schema. Refuses values that do not fit, by their key.
#
# Supported: strings, numbers, booleans, None, `tuple`, `Mapping[str, ...]`, `Literal`, `X | None`, dataclasses, and
# types annotated with a `Range` or a `StringForm`. A field with a default may be missing. -inf is written as the string
# "-inf", since JSON has no infinities.

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
    """A value of type `kind` from JSON; `name` is the path to it, such as `samples[0].text`. Raises: MalformedError."""
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


MAX_SAMPLES = 10_000

Count = Annotated[int, Range(0, 2**63 - 1)]
TokenId = Annotated[int, Range(0, 2**31 - 1)]
Bias = float  # finite or -inf
Name = Annotated[str, StringForm(r"[^\0]+", "a string, not empty and without NUL")]
Sha256 = Annotated[str, StringForm("[0-9a-f]{64}", "64 hexadecimal digits")]


@dataclass(frozen=True)
class FileFacts:
    """One file that the text depended on. Units: size in bytes."""

    size: Count
    sha256: Sha256


@dataclass(frozen=True)
class AdapterFacts:
    """A LoRA adapter: its name on the command line, its commit if it is in the hub's cache, its weight."""

    name: Name
    commit: Annotated[str, StringForm("[0-9a-f]{40}", "40 hexadecimal digits")] | None
    weight: float


@dataclass(frozen=True)
class ModelFacts:
    """`name` is the model's name on the command line; `commit` is given for a model in the hub's cache.

    The files of adapters are among `files`.
    """

    name: Name
    commit: Annotated[str, StringForm("[0-9a-f]{40}", "40 hexadecimal digits")] | None
    files: Mapping[str, FileFacts]
    adapters: tuple[AdapterFacts, ...] = ()


@dataclass(frozen=True)
class RunnerFacts:
    """What computed the text. `description` is in words; the others ask for the same runner again."""

    description: str
    device: Annotated[str, StringForm("cpu|cuda:[0-9]{1,3}", "cpu or cuda:N")]
    dtype: Annotated[str, StringForm("auto|float32|bfloat16|float16", "auto, float32, bfloat16 or float16")]
    kv_cache: Annotated[str, StringForm("auto|int8", "auto or int8")]
    threads: Annotated[int, Range(1, 1024)] | None
    context: Annotated[int, Range(1, 2**31 - 1)]


@dataclass(frozen=True)
class PromptFacts:
    """What the model read. With `chat` the text is a message, formatted by the chat template.

    `chat_template` is the value of --chat-template.
    """

    text: str
    chat: bool
    system: str | None
    chat_template: Name | None
    token_ids: tuple[TokenId, ...]


@dataclass(frozen=True)
class SamplingFacts:
    """How tokens were chosen: the parameters by name, and the fields of `Sampler`."""

    seed: Annotated[int, Range(0, 2**64 - 1)]
    parameters: Mapping[str, float]
    order: tuple[str, ...]
    ignore_eos: bool
    eos_token_ids: tuple[TokenId, ...]
    logit_bias: tuple[tuple[TokenId, Bias], ...]
    sequence_bias: tuple[tuple[tuple[TokenId, ...], Bias], ...]
    begin_suppress_token_ids: tuple[TokenId, ...]
    forced_eos_token_ids: tuple[TokenId, ...]
    dry_breaker_token_ids: tuple[TokenId, ...]


@dataclass(frozen=True)
class StoppingFacts:
    """What ended a text besides end-of-sequence tokens; `at_start` drops the space before its first word."""

    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] | None
    stop_strings: tuple[Annotated[str, StringForm("(?s).+", "a string that is not empty")], ...]
    at_start: bool


@dataclass(frozen=True)
class SchemaFacts:
    """What the texts had to match: `name` is the user's name for it, `lark` the grammar for llguidance."""

    name: Name
    lark: str


@dataclass(frozen=True)
class SampleFacts:
    """One text. `sample` is its number from 1; `token_ids` are all that were sampled."""

    sample: Annotated[int, Range(1, 2**32)]
    token_ids: tuple[TokenId, ...]
    text: str
    finish_reason: Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class Receipt:
    """A run. `program` has versions by name, `machine` the known facts about processor, system and card."""

    model: ModelFacts
    program: Mapping[str, str]
    machine: Mapping[str, str]
    runner: RunnerFacts
    prompt: PromptFacts
    sampling: SamplingFacts
    stopping: StoppingFacts
    samples: tuple[SampleFacts, ...]
    schema: SchemaFacts | None = None

    def check(self) -> None:
        """Refuse parts that contradict each other. Raises: MalformedError"""
        if not self.prompt.token_ids:
            raise MalformedError("prompt.token_ids is empty")
        needed = len(self.prompt.token_ids) + (self.stopping.max_new_tokens or 1)
        if needed > self.runner.context:
            raise MalformedError(f"runner.context is {self.runner.context}, and prompt and new tokens are {needed}")
        numbers = [item.sample for item in self.samples]
        if not 0 < len(numbers) <= MAX_SAMPLES:
            raise MalformedError(f"samples holds {len(numbers)}, expected 1 to {MAX_SAMPLES}")
        if len(set(numbers)) < len(numbers):
            raise MalformedError("samples holds the same sample twice")


# Receipts as JSON files that people can read. Refuses to replace or load any other file.
#
# A receipt holds the SHA-256 of its own content, so that a change by hand or by a disk is noticed. It does not prove
# who wrote it.

FORMAT = "llmcli receipt"
VERSION = 1

_MARK = re.compile(rb'"format"\s*:\s*"llmcli receipt"')
# Only its owner may read it: it holds the prompt.
RECEIPT_FILE = OutputFile(
    "a receipt of llmcli",
    lambda head: _MARK.search(head) is not None,
    "replace it with --force, or name another file",
    mode=0o600,
)
_NUMBERS = re.compile(r"\[\n\s*(-?\d[\d,\s]*?)\s*\]")


@dataclass(frozen=True)
class LoadedReceipt:
    """A receipt, and whether its file still holds what was written."""

    receipt: Receipt
    is_unchanged: bool


def save_receipt(path: Path, receipt: Receipt, *, replace: bool) -> None:
    """Write a receipt, whole or not at all.

    Raises: UsageError for a path that cannot be written, holds anything but a receipt, or, unless `replace`, exists;
    OutputError if the disk is full or fails.
    """
    # A model's path may hold bytes that are not UTF-8. Such a model must be named again.
    content = json.loads(json.dumps(to_json(receipt), ensure_ascii=False).encode(errors="replace"))
    values = {"format": FORMAT, "version": VERSION, **content, "sha256": _digest(content)}
    text = json.dumps(values, ensure_ascii=False, indent=2)
    # Put each list of ids on one line: JSON strings hold no line breaks, so only lists of numbers match.
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    RECEIPT_FILE.write(path, f"{text}\n".encode(), replace=replace)


def load_receipt(path: Path) -> LoadedReceipt:
    """Read a receipt. Raises: UsageError if the file cannot be read, is not a receipt, or has an unknown version."""
    content = RECEIPT.read_json_object(path)
    if content.pop("format", None) != FORMAT:
        raise UsageError(f'{path} is not a receipt: it lacks the line "format": "{FORMAT}"')
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise UsageError(
            f"{path} has version {version!r:.60} of the format, but this llmcli reads version {VERSION}; "
            "use the llmcli that wrote it"
        )
    digest = content.pop("sha256", None)
    try:
        receipt: Receipt = from_json(Receipt, content)
        receipt.check()
        return LoadedReceipt(receipt, digest == _digest(content))
    except MalformedError as error:
        raise UsageError(f"{path} is not a valid receipt: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# The differences of a run from a receipt: in what the text depends on, and in the text.


@dataclass(frozen=True)
class SampleComparison:
    """A sample of a receipt and the same sample now. `first` is the index of the first token that differs, None if
    all are the same; one text may be the beginning of the other.
    """

    then: SampleFacts
    now: SampleFacts
    first: int | None

    @property
    def is_same(self) -> bool:
        """Whether tokens, text and end are the same."""
        return self.then == self.now

    def tokens_at_first(self) -> tuple[int | None, int | None]:
        """The first tokens that differ, then and now; None for a text that has ended."""
        assert self.first is not None
        then, now = (ids[self.first : self.first + 1] for ids in (self.then.token_ids, self.now.token_ids))
        return (then[0] if then else None, now[0] if now else None)


def compare_receipts(then: Receipt, now: Receipt) -> list[Difference]:
    """What differs in all that a text depends on; compares files and versions, but not names of models."""
    return find_differences(_settings(then), _settings(now))


def compare_samples(then: Iterable[SampleFacts], now: Iterable[SampleFacts]) -> list[SampleComparison]:
    """The samples in both, in the order of their numbers."""
    found = {item.sample: item for item in now}
    pairs = [(item, found[item.sample]) for item in sorted(then, key=lambda item: item.sample) if item.sample in found]
    return [SampleComparison(old, new, _first_token(old, new)) for old, new in pairs]


def _first_token(then: SampleFacts, now: SampleFacts) -> int | None:
    return None if then.token_ids == now.token_ids else first_difference(then.token_ids, now.token_ids)


def _settings(receipt: Receipt) -> dict[str, Any]:
    """Everything except the model's name and the texts, by names for people."""
    return {
        "commit": receipt.model.commit,
        **{
            f"adapter {number}": f"commit {adapter.commit}, weight {adapter.weight:g}"
            for number, adapter in enumerate(receipt.model.adapters, 1)
        },
        **{f"file {name}": f"sha256 {facts.sha256}" for name, facts in receipt.model.files.items()},
        **receipt.program,
        **receipt.machine,
        **_flat("runner ", to_json(receipt.runner)),
        **_flat("prompt ", to_json(receipt.prompt)),
        **_flat("", to_json(receipt.sampling)),
        **_flat("", to_json(receipt.stopping)),
        "schema": None if receipt.schema is None else receipt.schema.lark,
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= value
        else:
            flat[f"{prefix}{name}"] = value
    return flat
