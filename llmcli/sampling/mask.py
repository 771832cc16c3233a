"""The chain's first step for a text that is held to a schema: it removes the tokens that the schema does not allow."""

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.sampling.candidates import Candidates

# [ceil(vocab_size / 32)] uint32. Bit t % 32 of word t // 32 says that token t may be chosen.
TokenMask = NDArray[np.uint32]


def mask_words(vocab_size: int) -> int:
    """Words of a mask for so many tokens."""
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
    """Keep the tokens that the mask allows.

    Raises: UsageError if the logits exclude all of them.
    """
    kept = candidates.keep(unpack_mask(mask)[candidates.token_ids])
    if not len(kept.token_ids):
        raise UsageError(
            f"the model excludes every token that the schema allows at position {position}; use another model"
        )
    return kept
