"""`Receipt`: everything that a text depended on, and the text. Refuses values that no run can have had.

Two runs with the same settings on the same machine have equal receipts, so there is no time in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from llmcli.receipt.codec import Form, MalformedError, Range

MAX_SAMPLES = 10_000

Count = Annotated[int, Range(0, 2**63 - 1)]
TokenId = Annotated[int, Range(0, 2**31 - 1)]
Bias = float  # finite or -inf
Name = Annotated[str, Form(r"[^\0]+", "a string, not empty and without NUL")]
Sha256 = Annotated[str, Form("[0-9a-f]{64}", "64 hexadecimal digits")]


@dataclass(frozen=True)
class FileFacts:
    """One file that the text depended on. Units: size in bytes."""

    size: Count
    sha256: Sha256


@dataclass(frozen=True)
class AdapterFacts:
    """A LoRA adapter: its name as the command line has it, its commit if it is in the hub's cache, its weight."""

    name: Name
    commit: Annotated[str, Form("[0-9a-f]{40}", "40 hexadecimal digits")] | None
    weight: float


@dataclass(frozen=True)
class ModelFacts:
    """`name` is the model as the command line named it; `commit` is there for one in the hub's cache.

    The files of adapters are among `files`.
    """

    name: Name
    commit: Annotated[str, Form("[0-9a-f]{40}", "40 hexadecimal digits")] | None
    files: Mapping[str, FileFacts]
    adapters: tuple[AdapterFacts, ...] = ()


@dataclass(frozen=True)
class RunnerFacts:
    """What computed the text. `description` says it in words; the others are what asks for the same again."""

    description: str
    device: Annotated[str, Form("cpu|cuda:[0-9]{1,3}", "cpu or cuda:N")]
    dtype: Annotated[str, Form("auto|float32|bfloat16|float16", "auto, float32, bfloat16 or float16")]
    kv_cache: Annotated[str, Form("auto|int8", "auto or int8")]
    threads: Annotated[int, Range(1, 1024)] | None
    context: Annotated[int, Range(1, 2**31 - 1)]


@dataclass(frozen=True)
class PromptFacts:
    """What the model read. With `chat` the text is a message, which the chat template has put into form.

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
    """What ended a text beside end-of-sequence tokens; `at_start` drops the space before its first word."""

    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] | None
    stop_strings: tuple[Annotated[str, Form("(?s).+", "a string that is not empty")], ...]
    at_start: bool


@dataclass(frozen=True)
class SchemaFacts:
    """What the texts were held to: `name` is what the user knew it by, `lark` the grammar as llguidance had it."""

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
    """A run. `program` has versions by name, `machine` what is known of processor, system and card."""

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
