"""The rule of how many drafts a step has, against a simulation of steps."""

import random

import pytest

from llmcli.engine.draft_length import KeptRates, StepTimes, best_length


def tokens_per_time(length: int, rate: float, share: float, rng: random.Random, steps: int = 20_000) -> float:
    """What steps with so many drafts bring, drawn one by one."""
    tokens = 0
    for _ in range(steps):
        kept = 0
        while kept < length and rng.random() < rate:
            kept += 1
        tokens += 1 + kept
    return tokens / (steps * (1 + length * share))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0])
def test_no_other_length_brings_more(rate: float, share: float) -> None:
    rng = random.Random(1)
    found = best_length(rate, share, 7)
    rates = [tokens_per_time(length, rate, share, rng) for length in range(8)]
    assert rates[found] >= max(rates) * 0.96  # 3 % is what drafts must gain, 1 % the noise of the simulation


def test_no_drafts_where_they_do_not_pay() -> None:
    assert best_length(0.9, 1.0, 7) == 0
    assert best_length(0.02, 0.02, 7) == 0
    assert best_length(0.02, 0.02, 7, least=1) == 1
    assert best_length(0.99, 0.02, 3) == 3
    assert best_length(1.0, 0.0, 7) == 7


def test_rates_follow_what_was_kept_lately() -> None:
    rates = KeptRates()
    for _ in range(10):
        rates.learn(2, 3, ends_wrong=False)
    assert rates.rate(2) > 0.95
    assert rates.rate(1) == 0.6
    for _ in range(20):
        rates.learn(2, 0, ends_wrong=True)
    assert rates.rate(2) < 0.1


def test_the_share_of_a_draft() -> None:
    times = StepTimes()
    assert not times.knows(1)
    times.learn(1, 3, 1.0)  # there is nothing to compare with
    assert times.share == 0.05
    for seconds in (0.010, 0.010, 0.5, 0.010):  # a pause does not count
        times.learn(1, 0, seconds)
    for num_drafts in (1, 4, 7):
        assert not times.is_measured
        times.learn(1, num_drafts, 0.010 * (1 + 0.2 * num_drafts))
    assert times.is_measured
    assert times.share == pytest.approx(0.2)
    times.learn(2, 0, 0.020)
    for _ in range(8):
        times.learn(2, 2, 0.010)  # noise may say that drafts take less than no time
    assert times.share == 0
