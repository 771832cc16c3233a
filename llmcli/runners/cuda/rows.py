"""`Row`: what the host knows of one sequence; its keys, values and logits lie on the card."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Row:
    """One sequence, in row `index` of the KV cache.

    Invariant: the first `num_cached` tokens have their keys and values in the cache. `logits` are those after the last
    token, in one of the two buffers, or None while they must be computed; then `num_cached` may be one short.
    Shapes: prefill_buffer, decode_buffer, logits float32 [vocab_size] on the card; the first holds the logits at
            `prefill_end`, from which every sample of a prompt starts
    """

    index: int
    prefill_buffer: Any
    decode_buffer: Any
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    logits: Any = None
    prefill_end: int = 0  # 0: the prefill buffer holds nothing
    mirostat_mu: float | None = None  # after the last token that a decode has given out; None if it was off

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; the last runs again for its logits, unless a prefill ended there."""
        if num_tokens == len(self.token_ids):
            return
        self.keep(num_tokens)
        if num_tokens and num_tokens == self.prefill_end:
            self.logits = self.prefill_buffer

    def keep(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, for others to follow."""
        self.logits = None
        del self.token_ids[num_tokens:]
        self.num_cached = min(self.num_cached, num_tokens)
        if num_tokens < self.prefill_end:
            self.prefill_end = 0

    def append_computed(self, token_ids: Sequence[int], logits: Any) -> None:
        """Take up tokens whose keys and values have been added to the cache, with the logits after the last or None."""
        self.logits = None
        self.token_ids.extend(token_ids)
        self.num_cached = len(self.token_ids)
        self.logits = logits

    def become(self, other: "Row") -> None:
        """Hold what `other` holds; the contents of cache and buffers have been copied."""
        self.token_ids = list(other.token_ids)
        self.num_cached, self.prefill_end = other.num_cached, other.prefill_end
        if other.logits is not None:
            self.logits = self.prefill_buffer if other.logits is other.prefill_buffer else self.decode_buffer


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
