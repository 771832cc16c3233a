"""`Candidates`, the input and output of every step of the chain, and how they are made from one row of logits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import CheckpointError, UsageError

History = Sequence[int] | NDArray[np.integer]

# Scores stay within this, so that the difference of any two is finite too.
LARGEST_SCORE = 1e300


class Candidates(NamedTuple):
    """The tokens that can still be chosen; never empty.

    Shapes: token_ids [num_candidates] int64, each once; scores [num_candidates] float64, natural logarithms of
    unnormalised probabilities. `choose` keeps them in ascending order of token id; no step relies on that.
    """

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float64]

    def keep(self, mask: NDArray[np.bool_]) -> "Candidates":
        """Return the candidates whose entry in `mask` [num_candidates] is true."""
        return Candidates(self.token_ids[mask], self.scores[mask])

    def weights(self) -> NDArray[np.float64]:
        """Return exp(score - highest score), [num_candidates] float64."""
        weights: NDArray[np.float64] = self.scores - self.scores.max()
        return np.exp(weights, out=weights)  # a new array of a whole vocabulary costs more than its numbers

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probabilities that the scores stand for, [num_candidates] float64."""
        weights = self.weights()
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities

    def occurrences(self, token_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return how often each candidate occurs in `token_ids`, whose ids may lie outside the vocabulary.

        Shapes: token_ids [any] int64; result [num_candidates] int32.
        """
        num_ids = int(self.token_ids.max()) + 1
        # A table over the vocabulary: 128,256 candidates and 1,000 ids take 0.2 ms, np.isin takes 1.3 ms.
        table = np.bincount(token_ids[token_ids < num_ids], minlength=num_ids).astype(np.int32)
        return table[self.token_ids]


def check_logits(logits: NDArray[np.float32], position: int) -> None:
    """Refuse logits that no sound model computes.

    Shapes: logits [vocab_size] float32.
    Raises: CheckpointError for NaN, +inf, or -inf everywhere
    """
    highest = logits.max()  # NaN if there is any
    if not np.isfinite(highest):
        kind = "NaN" if np.isnan(highest) else "infinite" if highest > 0 else "only -inf"
        raise CheckpointError(
            f"the model produced {kind} logits at position {position}, expected finite numbers: "
            "its weights are damaged or overflow; download it again, or run it with --dtype float32 if it ran in "
            "another type"
        )


def gather_candidates(logits: NDArray[np.float32], position: int) -> Candidates:
    """Return all tokens with a logit above -inf, which marks tokens that must not be chosen.

    Shapes: logits [vocab_size] float32.
    Raises: CheckpointError as `check_logits`
    """
    check_logits(logits, position)
    if logits.min() > -np.inf:  # nearly always nothing to leave out: a third of the time
        return Candidates(np.arange(len(logits)), logits.astype(np.float64))
    token_ids = np.flatnonzero(logits > -np.inf)
    return Candidates(token_ids, logits[token_ids].astype(np.float64))


# The chain's first step for a text with a schema: it removes the tokens that the schema does not allow.

# [ceil(vocab_size / 32)] uint32. Bit t % 32 of word t // 32 says that token t may be chosen.
TokenMask = NDArray[np.uint32]


def mask_words(vocab_size: int) -> int:
    """Words of a mask for `vocab_size` tokens."""
    return -(-vocab_size // 32)


def pack_mask(is_allowed: NDArray[np.bool_]) -> TokenMask:
    """The mask that allows the tokens whose entry in `is_allowed` [vocab_size] is true."""
    packed = np.zeros(mask_words(len(is_allowed)), "<u4")
    bits = np.packbits(is_allowed, bitorder="little")
    packed.view(np.uint8)[: len(bits)] = bits
    return packed.astype(np.uint32, copy=False)


def unpack_mask(mask: TokenMask) -> NDArray[np.bool_]:
    """Whether each token may be chosen. Shapes: result [32 * words] bool"""
    return np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little").view(np.bool_)


def schema(candidates: Candidates, mask: TokenMask, position: int) -> Candidates:
    """Keep the tokens that the mask allows. Raises: UsageError if the logits exclude all of them."""
    kept = candidates.keep(unpack_mask(mask)[candidates.token_ids])
    if not len(kept.token_ids):
        raise UsageError(
            f"the model excludes every token that the schema allows at position {position}; use another model"
        )
    return kept
