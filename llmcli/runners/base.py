"""The seam between the engine and a loaded model: steps over the spans of rows.

A row is a sequence of token ids whose keys and values lie in pages of the KV cache. A step runs some tokens of some
rows and chooses the next tokens. Between steps rows join, leave, fork and roll back; no other row notices. The bits of
a row's logits depend only on its tokens and on where its prompt ends: not on other rows, nor on its pages, nor on how
its tokens were cut into spans.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.errors import LLMCliError
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler

Logits = npt.NDArray[np.float32]  # [vocab_size]
AllLogits = npt.NDArray[np.float32]  # [num_tokens, vocab_size]
# What a text held to a schema may go on with: a mask for each choice of a span, uint32 [num_choices, words], see
# `llmcli.sampling.candidates`. A runner calls it once a step, as late as it can: masks are made while it works.
Masks = Callable[[], npt.NDArray[np.uint32]]
HiddenStates = npt.NDArray[np.float32]  # [num_hidden_layers + 1, num_tokens, hidden_size]

MAX_ROWS = 256  # rows that choose tokens in one step
PAGE_TOKENS = 16  # tokens in a page of the KV cache; a page covers all layers
BLOCK_TOKENS = 128  # while rows wait, run whole blocks of a prompt: runners have prepared these sizes
# The longest span outside a prompt. It gives, bit for bit, what single steps give.
MAX_SPAN = 8


def pages_of(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens need."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Arithmetic:
    """How a runner computes: what its logits' bits depend on besides the model's files and the machine.

    `dtype` and `kv_cache` are the values of --dtype and --kv-cache that ask for the same again. `num_threads` is None
    on a card. `libraries` are the packages that compute, such as `torch`. `own_kernels` has the SHA-256 of each of the
    user's kernels that replaces one of ours, by name; `cpu_sources` that of each C++ source that computes in place of a
    library.
    """

    dtype: str
    kv_cache: str
    num_threads: int | None
    libraries: tuple[str, ...]
    own_kernels: Mapping[str, str] = field(default_factory=dict)
    cpu_sources: Mapping[str, str] = field(default_factory=dict)


Choose = Literal["none", "last", "every"]
Chosen = tuple[Choice, ...] | LLMCliError


@dataclass(frozen=True)
class Limits:
    """What a runner has room for and accepts. `weight_bytes` and `cache_bytes` are bytes of the device's memory.

    `num_rows` rows with a sampler can be open at once; rows without one cost pages only. With `works_ahead`, `queue`
    returns while the device still works: queue the next step before you read this one. A span may have up to
    `max_drafts` drafts; 0 where the runner cannot verify them. With `takes_masks` a span may have masks. With
    `joins_prompts` the prompts of a step share passes over the weights: run several in a step.
    """

    num_rows: int
    max_seq_len: int
    num_pages: int
    works_ahead: bool
    max_drafts: int = 0
    takes_masks: bool = False
    joins_prompts: bool = False
    weight_bytes: int = 0
    cache_bytes: int = 0


class Span(NamedTuple):
    """One row's part of a step. A NamedTuple, as a frozen dataclass is slow to make and each row needs one a step.

    The tokens follow those that the row holds. () means the token that the row chose last; the host need not know it
    yet. `choose` says where tokens are chosen: after the last token, after each, or nowhere. With `logits` nothing
    runs; the token is chosen from them.

    `drafts` are guesses of what follows the token that the row chose last, whose choice has been read. They run after
    it. A token is chosen after it, and after each draft while the drafts so far equal the choices: the row keeps those
    drafts, and the last choice is its latest token. If the choice after a kept draft fails, the row's next span makes
    it. Read the choices before you queue another span of the row.

    With `masks` only what they allow is chosen. An error of ours that they raise becomes the span's error.

    `Step.logits` may be asked for the span's tokens from `logits_from` on. A runner may leave out work that only the
    logits of earlier tokens need.
    """

    row: int
    token_ids: tuple[int, ...] = ()
    choose: Choose = "last"
    logits: Logits | None = None
    drafts: tuple[int, ...] = ()
    masks: Masks | None = None
    logits_from: int = 0


class Step(Protocol):
    """A step that has been queued. Its results come in the order of its spans."""

    def choices(self) -> list[Chosen]:
        """The choices of each span, or the error that left no token to choose. Waits for this step only.

        Steps may be read in another order than they were queued. A span with drafts has one choice more than it keeps
        drafts.

        Raises: DeviceError
        """

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """The logits after each of a span's tokens, from token `first` on. Read them before you queue the next step.

        Drafts that were not kept have some too.
        Raises: ValueError for a `first` before the span's `logits_from`

        Shapes: result [number of the span's tokens - first, vocab_size]
        """

    def prompt_seconds(self) -> float:
        """How long the device worked on this step's prompts. Waits for them. Decoding is not timed."""


class Runner(Protocol):
    """A model with its weights loaded and its KV cache allocated. Loading is each runner's own function `load`."""

    @property
    def config(self) -> LlamaConfig:
        """The shape of the loaded model."""

    @property
    def description(self) -> str:
        """Device and precision for the user, such as `CPU, float32, 2 threads`."""

    @property
    def cache_type(self) -> str:
        """Type of the KV cache's elements, such as `float16` or `int8`."""

    @property
    def arithmetic(self) -> Arithmetic:
        """How it computes."""

    @property
    def limits(self) -> Limits:
        """What there is room for."""

    @property
    def free_pages(self) -> int:
        """Pages that no open row holds."""

    def open(self, prompt: Sequence[int], sampler: Sampler | None = None, said: Sequence[int] = ()) -> int:
        """Open a row for a prompt, and return its number. A row without a sampler cannot choose tokens.

        `said` are tokens that will run after the prompt. The row shares the longest beginning of both that is still
        held from another prompt or an offered row; `num_tokens` returns its length. At least the last token remains to
        be run.
        Raises: ValueError if the prompt is empty, longer than max_seq_len, or has an id outside the vocabulary, and
                if no row is left; UsageError for a sampler that the device cannot hold
        """

    def fork(self, row: int, num_tokens: int, sampler: Sampler | None = None) -> int:
        """Open a row that shares the first `num_tokens` tokens of `row`, and return its number. `row` must hold them.

        Raises: ValueError, UsageError as `open`
        """

    def change_prompt(self, row: int, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        """Give the row another prompt and sampler. It keeps the beginning that its tokens share with the prompt.

        Kept tokens may have been computed as an answer; then the bits are not those of a new row.
        Raises: ValueError, UsageError as `open`
        """

    def set_sampler(self, row: int, sampler: Sampler) -> None:
        """Choose by another sampler from the next step on. Raises: UsageError as `open`"""

    def keep(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens. The next span must name its tokens. Raises: ValueError"""

    def offer(self, row: int) -> None:
        """Keep the row's full pages until room is needed, for rows that `open` with the same prompt and `said`."""

    def close(self, row: int) -> None:
        """Free the row's pages and its slot. A queued step may still work on it."""

    def token_ids(self, row: int) -> Sequence[int]:
        """The row's tokens, without those at the end whose choice has not been read yet."""

    def num_tokens(self, row: int) -> int:
        """Tokens that the row holds, with those of queued steps; drafts count once the step that keeps them is read."""

    def span_end(self, row: int, most: int) -> int:
        """Where the next span of the row's prompt ends: about `most` tokens on, at the prompt's end at the latest.

        A prompt cut anywhere else would get other bits.
        """

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all. False if too few pages are free; then nothing changes.

        `queue` reserves too, and raises if there is no room.
        """

    def queue(self, spans: Sequence[Span]) -> Step:
        """Queue a step. A row has one span a step. A span outside a prompt has at most MAX_SPAN tokens.

        After an exception or a Ctrl-C every row holds what it held before.
        Raises: ValueError for a span that breaks these rules; DeviceError
        """

    def hidden_states(self, span: Span, inputs: HiddenStates | None = None) -> HiddenStates:
        """Run one span as `queue` does, and return the embeddings of its tokens and the output of every layer.

        With `inputs`, the states of another runner, each layer gets that runner's output of the layer before. So
        `verify` compares each layer alone. The span names its tokens and chooses nothing; every layer is waited for.
        Raises: as `queue`
        """


def spans_of_prompt(runner: Runner, row: int, prompt: Sequence[int], *, chooses: bool = False) -> Iterator[Span]:
    """The spans of the part of a row's prompt that has not run. Queue each before you ask for the next one.

    Only the last token has logits to read. With `chooses` a token is chosen there.
    """
    while (begin := runner.num_tokens(row)) < len(prompt):
        end = runner.span_end(row, len(prompt))
        is_last = end == len(prompt)
        choose: Choose = "last" if chooses and is_last else "none"
        yield Span(row, tuple(prompt[begin:end]), choose, logits_from=end - begin - is_last)
