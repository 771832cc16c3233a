"""The ways in which the tokens of prompts are multiplied with a model's matrices, and which prompt takes which."""

from dataclasses import dataclass
from typing import Literal, get_args

# Rows: as the rows of decoding are. Packed: from the codes, if the matrix has any. Widened: by gemm_wide, with all
# inputs in one chunk, or by the matrix library, for which the weights are widened first. Each way has its own rounding
# or order of sums.
Way = Literal["rows", "packed", "widened"]
WAYS: tuple[Way, ...] = get_args(Way)

# The most tokens of a prompt that is not widened. Alone, a prompt of up to some 200 tokens would be faster as rows.
# Many together would be slower, as "widened" multiplies all that fit a chunk together.
MAX_SHORT_TOKENS = 64
# The most tokens of short prompts in one pass.
MAX_TOGETHER = 256


@dataclass(frozen=True)
class PromptWays:
    """How a model's short prompts are multiplied on a card: as rows, where gemm_narrow takes all layers."""

    as_rows: bool

    def of(self, num_tokens: int) -> Way:
        """The way of a chunk of `num_tokens` tokens."""
        if num_tokens > MAX_SHORT_TOKENS:
            return "widened"
        return "rows" if self.as_rows else "packed"


def most_tokens_of(way: Way, chunk_tokens: int) -> int:
    """The most tokens that are multiplied together in this way, with chunks of `chunk_tokens`."""
    most = {"rows": MAX_TOGETHER, "packed": MAX_SHORT_TOKENS, "widened": chunk_tokens}
    return min(most[way], chunk_tokens)
