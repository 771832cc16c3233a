"""The seam between the engine and a loaded model: steps over the spans of rows.

A row is a sequence of token ids whose keys and values lie in pages of the KV cache. A step runs some tokens in each of
some rows and chooses what comes behind them. Rows join, leave, fork and are rolled back between steps, and no other row
notices: the bits of a row's logits depend on its tokens alone, and on where its prompt ends. They depend neither on the
rows beside it, nor on the pages it has, nor on how its tokens were cut into spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.errors import LLMCliError
from llmcli.sampling.chain import Choice
from llmcli.sampling.sampler import Sampler

Logits = npt.NDArray[np.float32]  # [vocab_size]
AllLogits = npt.NDArray[np.float32]  # [num_tokens, vocab_size]

MAX_ROWS = 256  # that choose tokens side by side
PAGE_TOKENS = 16  # of a page of the KV cache, over all layers
# A span of up to so many tokens outside the prompt gives, bit for bit, what as many single steps give.
MAX_SPAN = 8


def pages_of(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_TOKENS)


Choose = Literal["none", "last", "every"]
Chosen = tuple[Choice, ...] | LLMCliError


@dataclass(frozen=True)
class Limits:
    """What a runner has room for.

    `num_rows` rows with a sampler can be open at the same time; rows without one cost pages only. `works_ahead` says
    that `queue` returns while the device still works, so that the next step may be queued before this one is read.
    """

    num_rows: int
    max_seq_len: int
    num_pages: int
    works_ahead: bool


@dataclass(frozen=True)
class Span:
    """One row's part of a step.

    The tokens are run behind those that the row holds; () stands for the token that the row chose last, which the host
    need not know yet. Then a token is chosen: behind the last of them, behind every one, or none at all. With `logits`
    nothing is run, and the token is chosen from these.
    """

    row: int
    token_ids: tuple[int, ...] = ()
    choose: Choose = "last"
    logits: Logits | None = None


class Step(Protocol):
    """A step that has been queued. Its results come in the order of its spans."""

    def choices(self) -> list[Chosen]:
        """What each span has chosen, or the error that left it nothing to choose. Waits for this step only.

        Raises: DeviceError
        """

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """The logits behind the tokens from `first` on of one span. Only until the next step is queued.

        Shapes: result [number of the span's tokens - first, vocab_size]
        """


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
    def limits(self) -> Limits:
        """What there is room for."""

    @property
    def free_pages(self) -> int:
        """Pages that no open row holds."""

    def open(self, prompt: Sequence[int], sampler: Sampler | None = None) -> int:
        """Open a row for a prompt, and return its number. Without a sampler it can choose nothing.

        Where the beginning of another prompt is still there, the row shares it: `num_tokens` says how much. At least
        the last token remains to be run.
        Raises: ValueError if the prompt is empty, longer than max_seq_len, or has an id outside the vocabulary, and
                if no row is left; UsageError for a sampler that the device cannot hold
        """

    def fork(self, row: int, num_tokens: int, sampler: Sampler | None = None) -> int:
        """Open a row that shares the first `num_tokens` tokens of another one, which holds them; return its number.

        Raises: ValueError, UsageError as `open`
        """

    def change_prompt(self, row: int, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        """Let the row go on with another prompt and sampler; it keeps the beginning that the two have in common.

        What is kept may have been computed as an answer: then the bits are not those of a new row.
        Raises: ValueError, UsageError as `open`
        """

    def set_sampler(self, row: int, sampler: Sampler) -> None:
        """Choose by another sampler from the next step on. Raises: UsageError as `open`"""

    def keep(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens; what comes next must be named. Raises: ValueError"""

    def close(self, row: int) -> None:
        """Give the row's pages and its place back. A step that is under way may still work on it."""

    def token_ids(self, row: int) -> Sequence[int]:
        """The row's tokens, without the latest if no choice that brought them has been read."""

    def num_tokens(self, row: int) -> int:
        """Tokens that the row holds: those that have been run, and those that a queued step runs."""

    def span_end(self, row: int, most: int) -> int:
        """Where the next span of the row's prompt ends: about `most` tokens on, and at most at the prompt's end.

        Prompts may not be cut just anywhere without changing a bit.
        """

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make room for so many tokens in all; False if there are too few free pages, and then nothing has changed.

        `queue` does it too, and fails where there is no room.
        """

    def queue(self, spans: Sequence[Span]) -> Step:
        """Queue a step. Spans that are no part of a prompt have at most MAX_SPAN tokens; a row has one span a step.

        After an exception or a Ctrl-C every row holds what it held before.
        Raises: ValueError for spans that cannot be; DeviceError
        """
