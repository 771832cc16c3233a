"""Sizes, times, rates and divergences as people read them."""

import pytest

from llmcli.cli.units import divergence, duration, estimated_duration, rate, size


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (6 * 2**20, "6.0 MiB"), (3 * 2**40, "3072.00 GiB")],
)
def test_size(num_bytes: int, expected: str) -> None:
    assert size(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(4.46e-2, "44.6 ms"), (1, "1.0 s"), (98.8, "98.8 s"), (600, "10 min"), (25149.1658, "7.0 h")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.9002, "less than a second"),
        (1.04, "about 1 s"),
        (98.8, "about 99 s"),
        (600, "about 10 min"),
        (25149, "about 7.0 h"),
    ],
)
def test_an_estimate_is_no_finer_than_a_second(seconds: float, expected: str) -> None:
    assert estimated_duration(seconds) == expected


@pytest.mark.parametrize(
    ("nats", "expected"),
    [
        (0, "0"),
        (2.8812e-5, "0.0000288"),
        (0.00972, "0.00972"),
        (0.01, "0.01"),
        (12, "12"),
        (3e-17, "under 0.000001"),
        (-3e-17, "under 0.000001"),
    ],
)
def test_a_divergence_has_no_exponent(nats: float, expected: str) -> None:
    assert divergence(nats) == expected


def test_digits_of_a_divergence() -> None:
    assert divergence(2.8812e-5, digits=2) == "0.000029"


@pytest.mark.parametrize(("per_second", "expected"), [(0.0421, "0.042"), (1, "1.0"), (12345.6, "12,345.6")])
def test_rate(per_second: float, expected: str) -> None:
    assert rate(per_second) == expected
