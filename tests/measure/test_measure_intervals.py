"""Intervals against sums by hand, the density of Student's t, and how often they hold the truth in simulated texts."""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmcli.measure.intervals import Interval, mean_interval, share_interval

DRAW = np.random.default_rng(11)


def upper_tail(value: float, freedom: int) -> float:
    """The share of Student's t above a value, by summing its density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    places = np.linspace(value, 400, 4_000_001)
    return float(np.trapezoid(scale * (1 + places**2 / freedom) ** (-(freedom + 1) / 2), places))


def test_a_mean_by_hand() -> None:
    values = DRAW.gamma(1.0, size=1000)
    means = [statistics.fmean(values[begin : begin + 50]) for begin in range(0, 1000, 50)]
    low, high = mean_interval(values) or (0, 0)
    assert (low + high) / 2 == pytest.approx(statistics.fmean(values))
    margin = (high - low) / 2 / (statistics.stdev(means) / math.sqrt(20))
    assert upper_tail(margin, 19) == pytest.approx(0.025, abs=1e-7)


@pytest.mark.parametrize("misses", [range(0, 2000, 40), range(300, 350), [*range(5, 30), *range(1500, 1525)]])
def test_a_share_by_hand(misses: Sequence[int]) -> None:
    """Wilson's interval ends at the shares from which what was seen is just as far away as t allows."""
    hits = ~np.isin(np.arange(2000), misses)
    ends = share_interval(hits) or (0, 0)
    means = [statistics.fmean(hits[begin : begin + 100]) for begin in range(0, 2000, 100)]
    error = max(statistics.stdev(means) / math.sqrt(20), math.sqrt(0.975 * 0.025 / 2000))
    for end in ends:
        error_there = error * math.sqrt(end * (1 - end) / (0.975 * 0.025))
        assert abs(0.975 - end) / error_there == pytest.approx(2.0930, rel=1e-4)


def alike(count: int, likeness: float) -> np.ndarray:
    """Values of mean 0, each like the one before."""
    steps = DRAW.normal(size=count)
    values = np.empty(count)
    values[0] = steps[0]
    for place in range(1, count):
        values[place] = likeness * values[place - 1] + math.sqrt(1 - likeness**2) * steps[place]
    return values


def held(interval: Callable[[np.ndarray], Interval | None], texts: list[np.ndarray], truth: float) -> float:
    """The share of intervals that hold the truth."""
    ends = [interval(text) or (math.nan, math.nan) for text in texts]
    return statistics.fmean(low <= truth <= high for low, high in ends)


def test_ninety_five_of_a_hundred_hold_the_mean() -> None:
    """Also where tokens are alike; an error that takes each for itself holds it far too seldom there."""
    assert held(mean_interval, [DRAW.gamma(0.5, size=1000) for _ in range(2000)], 0.5) == pytest.approx(0.95, abs=0.02)
    texts = [alike(2000, 0.8) for _ in range(600)]
    assert held(mean_interval, texts, 0) == pytest.approx(0.95, abs=0.03)
    margins = [1.96 * text.std() / math.sqrt(len(text)) for text in texts]
    naive = statistics.fmean(abs(text.mean()) < margin for text, margin in zip(texts, margins, strict=True))
    assert naive < 0.6


def test_ninety_five_of_a_hundred_hold_the_share() -> None:
    few = [DRAW.random(500) < 0.99 for _ in range(2000)]
    assert 0.94 < held(share_interval, few, 0.99) < 0.99
    limit = statistics.NormalDist().inv_cdf(0.95)
    runs = [alike(2000, 0.8) < limit for _ in range(600)]
    assert 0.93 < held(share_interval, runs, 0.95) < 0.99


def test_the_ends_of_a_share() -> None:
    """Tokens that all agree do not make it certain."""
    low, high = share_interval(np.ones(100, dtype=bool)) or (0, 0)
    assert high == 1
    assert (1 - low) / math.sqrt(low * (1 - low) / 100) == pytest.approx(2.0930, rel=1e-4)
    none = share_interval(np.zeros(100, dtype=bool)) or (1, 1)
    assert none == (pytest.approx(0, abs=1e-12), pytest.approx(1 - low))


def test_what_has_no_interval() -> None:
    assert mean_interval(np.ones(19)) is None
    assert share_interval(np.ones(19, dtype=bool)) is None
    assert mean_interval(np.array([1.0] * 30 + [math.inf])) is None
    assert mean_interval(np.ones(20)) == (1, 1)
