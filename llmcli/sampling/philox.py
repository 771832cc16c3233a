"""Random numbers as a function, not a state: Philox4x32-10 keyed by (seed, sample index, position, token id).

These four numbers give the same noise on any device, in any order, alone or in a batch. The counter is (token_id,
position, sample_index, purpose), so that numbers for different purposes never coincide.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the Random123 library).
"""

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
KEY_STEP_0 = 0x9E3779B9  # 2^32 / golden ratio: added to the key after each round
KEY_STEP_1 = 0xBB67AE85  # 2^32 * (sqrt(3) - 1)
WORD_MASK = 0xFFFFFFFF
WORD_BITS = np.uint64(32)

# The last word of the counter.
PURPOSE_NOISE = 0  # Gumbel noise, one number per token
PURPOSE_XTC = 1  # whether XTC acts, one number per position: token_id is 0

LARGEST_UNIFORM = 1.0 - 2.0**-53  # the largest double below 1

Integers = int | NDArray[np.integer]
Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Turn every counter into four random words with ten rounds of Philox; a word is 32 bits held in a uint64.

    Shapes: the four words of `counter` broadcast against each other; each word of the result has the common shape.
    Source: Salmon et al. 2011, section 3.3; Random123's philox.h.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(NUM_ROUNDS):
        # Both factors have 32 bits, so the 64-bit products never overflow.
        product_0 = word_0 * MULTIPLIER_0
        product_1 = word_2 * MULTIPLIER_1
        word_0 = (product_1 >> WORD_BITS) ^ word_1 ^ np.uint64(key_0)
        word_1 = product_1 & np.uint64(WORD_MASK)
        word_2 = (product_0 >> WORD_BITS) ^ word_3 ^ np.uint64(key_1)
        word_3 = product_0 & np.uint64(WORD_MASK)
        key_0 = (key_0 + KEY_STEP_0) & WORD_MASK
        key_1 = (key_1 + KEY_STEP_1) & WORD_MASK
    return word_0, word_1, word_2, word_3


def random_bits(
    seed: int, sample_index: Integers, position: Integers, token_ids: Integers, purpose: int = PURPOSE_NOISE
) -> Words:
    """Return 64 random bits for each token: words 0 (low) and 1 (high) of Philox4x32-10.

    The key is (low, high half of `seed`), the counter (token_id, position, sample_index, purpose).

    Why 64 bits: the smallest uniform number wins, and the smallest of 128k is near 2^-17. With 24 bits that is
    128 steps of the grid, so the winner's noise is coarse by 1 %, and two or so of the 128k always coincide; with 32
    bits they do in 85 % of draws. Tokens of equal score then tie, and the lower id gains. With 64 bits the
    chance of a coincidence is 4e-10.

    Shapes: sample_index, position and token_ids broadcast; the result has their common shape, uint64.
    Units: seed below 2^64; the others below 2^32.
    """
    counter = (
        np.asarray(token_ids, np.uint64),
        np.asarray(position, np.uint64),
        np.asarray(sample_index, np.uint64),
        np.asarray(purpose, np.uint64),
    )
    low, high, _, _ = philox4x32(counter, (seed & WORD_MASK, seed >> 32))
    return low | (high << WORD_BITS)


def gumbel_from_bits(bits: Words) -> NDArray[np.float64]:
    """Map 64 random bits to Gumbel noise -log(-log(1 - u)) with u = (bits + 1/2) / 2^64.

    -log1p(-u) is an exponential variable. The smallest one wins the race, and near 0 u has full relative precision,
    so the winner's noise is exact where -log(u), its mirror image, would be coarse. The noise lies in [-3.7, 45.1].

    Shapes: the result has the shape of `bits`, float64.
    """
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-64
    # The topmost 2^10 values round to u = 1, whose exponential is infinite.
    exponential = -np.log1p(-np.minimum(uniform, LARGEST_UNIFORM))
    noise: NDArray[np.float64] = -np.log(exponential)
    return noise


def gumbel(seed: int, sample_index: Integers, position: Integers, token_ids: Integers) -> NDArray[np.float64]:
    """Return the Gumbel noise of each token; arguments, shapes and units as in `random_bits`."""
    return gumbel_from_bits(random_bits(seed, sample_index, position, token_ids))


def uniform(seed: int, sample_index: Integers, position: Integers) -> NDArray[np.float64]:
    """Return XTC's number for each position, uniform in [0, 1): the upper 53 of 64 random bits.

    Shapes and units as in `random_bits`.
    """
    bits = random_bits(seed, sample_index, position, 0, PURPOSE_XTC)
    number: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return number
