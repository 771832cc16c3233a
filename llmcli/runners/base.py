"""The `Runner` protocol: what the engine may ask of a loaded model on any device.

A runner holds `num_rows` rows. A row is a sequence of token ids; which of them have been run through the model, and
when, is the runner's business. Prefill and decode are generators, so that a caller stops either by not asking for the
next item: between two items the row is consistent and every other operation is allowed. The same holds after an
exception or a Ctrl-C in the middle of an item: the row then holds what it held after the last finished item.

A runner that works ahead (samples on the device, read one step behind) drops on close what was not yet yielded.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.sampling.sampler import Sampler

Logits = npt.NDArray[np.float32]  # [vocab_size]
AllLogits = npt.NDArray[np.float32]  # [num_tokens, vocab_size]

MAX_ROWS = 256  # rows of one runner


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
    def num_rows(self) -> int:
        """Rows that can be decoded side by side."""

    @property
    def max_seq_len(self) -> int:
        """Tokens a row can hold."""

    def token_ids(self, row: int) -> Sequence[int]:
        """The row's tokens."""

    def prefill(self, row: int, token_ids: Sequence[int]) -> Generator[int, None, None]:
        """Make the row hold exactly `token_ids`, chunk by chunk; yield the number of tokens computed so far.

        The longest common prefix with what the row holds is kept, but for the last token, whose logits are needed.
        The first item comes before any work and is 0; the last is the number computed in all. A caller that stops
        early leaves the row with the kept prefix and the finished chunks.
        Raises: ValueError if `token_ids` is empty, longer than max_seq_len, or has an id outside the vocabulary.
        """

    def decode(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        """Sample one token for each of `rows`, append it, and yield the tokens in the order of `rows`; repeat.

        From token to token a row's `mirostat_mu` is handed on; the first has that of its sampler.
        Ends when one of the rows is full. One row's tokens do not depend on the other rows.
        Raises: ValueError if a row is empty or named twice; LLMCliError if the model yields no finite logits.
        """

    def mirostat_mu(self, row: int) -> float | None:
        """Mirostat's state after the last token that `decode` has yielded for the row; None if it was off."""

    def logits(self, row: int) -> Logits:
        """Logits of the token that would follow the row's last.

        Shapes: result [vocab_size] float32
        """

    def score(self, row: int, token_ids: Sequence[int], first: int) -> Generator[AllLogits, None, None]:
        """Make the row hold all but the last of `token_ids`, anew, and yield the logits that predict token_ids[first:].

        Shapes: each item [n, vocab_size] float32, the items together [len(token_ids) - first, vocab_size]
        Raises: ValueError as `prefill`, and if `first` is not from 1 to len(token_ids) - 1.
        """

    def truncate(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens.

        Rolling back to where the last prefill ended gives its logits again, bit for bit, so that every sample of a
        prompt starts alike.
        """

    def copy_row(self, source: int, target: int) -> None:
        """Make `target` hold the tokens of `source` without computing them again."""
