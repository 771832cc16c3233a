"""The generator against Random123's published answers, the noise against 50-digit arithmetic and its own law."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

from llmcli.sampling.chain import PURPOSE_XTC, gumbel, gumbel_from_bits, philox4x32, random_bits, uniform

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def hex_words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox4x32(tuple(np.asarray(word, np.uint64) for word in hex_words(counter)), tuple(hex_words(key)))
    assert [int(word) for word in words] == hex_words(expected)


def test_random_bits_place_each_number_in_its_word():
    assert int(random_bits(0, 0, 0, np.asarray(0, np.uint32))) == 0xE169C58D6627E8D5
    zero = np.asarray(0, np.uint64)
    low, high, _, _ = philox4x32(
        (np.asarray(11, np.uint64), np.asarray(7, np.uint64), np.asarray(3, np.uint64), zero), (0x89ABCDEF, 0x01234567)
    )
    assert int(random_bits(0x0123456789ABCDEF, 3, 7, np.asarray(11, np.uint32))) == int(high) << 32 | int(low)


def test_many_tokens_at_once_equal_each_alone():
    token_ids = np.arange(1000, dtype=np.uint32) * 131
    together = random_bits(5, 1, 9, token_ids)
    assert together.dtype == np.uint64
    assert [int(bits) for bits in together[:50]] == [int(random_bits(5, 1, 9, int(token))) for token in token_ids[:50]]
    grid = random_bits(5, np.arange(3)[:, None], 9, token_ids)
    np.testing.assert_array_equal(grid[1], together)


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 1000, 2**20 + 1, 2**40 + 7, 2**63, 2**64 - 2**40, 2**64 - 2**12])
def test_noise_agrees_with_fifty_digits(bits):
    with localcontext() as context:
        context.prec = 50
        uniform = (Decimal(bits) + Decimal("0.5")) / Decimal(2**64)
        exact = -(-(1 - uniform).ln()).ln()
    noise = float(gumbel_from_bits(np.asarray([bits], np.uint64))[0])
    # The rarest values, near u = 1, are noise below -3.2 and never decide; there u itself has 53 bits.
    assert noise == pytest.approx(float(exact), rel=1e-15, abs=1e-15 if bits < 2**63 else 1e-4)


def test_noise_is_finite_at_both_ends():
    lowest, highest = gumbel_from_bits(np.asarray([2**64 - 1, 0], np.uint64))
    assert lowest == pytest.approx(-np.log(53 * np.log(2)))
    assert highest == pytest.approx(65 * np.log(2), rel=1e-15)


def test_noise_follows_the_gumbel_law():
    noise = np.sort(gumbel(2024, 0, 17, np.arange(200_000)))
    law = np.exp(-np.exp(-noise))
    ranks = np.arange(1, len(noise) + 1) / len(noise)
    # Kolmogorov-Smirnov, 0.1 % critical value for large n: 1.949 / sqrt(n) (Smirnov 1948, table).
    assert np.abs(law - ranks).max() < 1.949 / np.sqrt(len(noise))


@pytest.mark.parametrize(
    "others",
    [
        {"seed": 1},
        {"seed": 1 << 32},
        {"seed": (1 << 64) - 1},
        {"sample_index": 1},
        {"position": 1},
        {"token_ids": np.arange(1, 100_001)},
    ],
    ids=["seed", "high half of seed", "all bits of seed", "sample_index", "position", "next token"],
)
def test_neighbouring_keys_give_independent_noise(others):
    base = {"seed": 0, "sample_index": 0, "position": 0, "token_ids": np.arange(100_000)}
    first, second = gumbel(**base), gumbel(**(base | others))
    # Four standard errors of the correlation of independent pairs, 1 / sqrt(n) each.
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(100_000)
    assert np.count_nonzero(first == second) == 0


def test_swapping_position_sample_and_token_changes_the_noise():
    values = {
        int(random_bits(3, *order)) for order in [(1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 4, 1), (4, 1, 2), (4, 2, 1)]
    }
    assert len(values) == 6


def test_uniform_numbers_come_from_their_own_counters():
    positions = np.arange(50)
    words = [np.asarray(word, np.uint64) for word in (0, positions, 3, PURPOSE_XTC)]
    low, high, _, _ = philox4x32(tuple(np.broadcast_arrays(*words)), (0x89ABCDEF, 0x01234567))
    expected = [(int(a) + (int(b) << 32) >> 11) / 2**53 for a, b in zip(low, high, strict=True)]
    np.testing.assert_array_equal(uniform(0x0123456789ABCDEF, 3, positions), expected)


def test_uniform_numbers_are_uniform_and_independent_of_the_noise():
    numbers = uniform(2024, 0, np.arange(100_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    ranks = np.arange(1, len(numbers) + 1) / len(numbers)
    # Bounds as in the tests of the noise.
    assert np.abs(np.sort(numbers) - ranks).max() < 1.949 / np.sqrt(len(numbers))
    for noise in (gumbel(2024, 0, np.arange(100_000), 0), uniform(2024, 1, np.arange(100_000))):
        assert abs(np.corrcoef(numbers, noise)[0, 1]) < 4 / np.sqrt(100_000)
