"""The rule of how many drafts a step has, against simulations of steps."""

import random
import statistics

import pytest

from llmcli.engine.draft_length import FIRST_COST, DraftCost, KeptRates, StepTimes, best_length


def num_kept(length: int, rate: float, rng: random.Random) -> int:
    """How many of the drafts of a step are right before the first wrong one."""
    return next((place for place in range(length) if rng.random() >= rate), length)


def step_time(length: int, cost: DraftCost) -> float:
    """A step's time, in steps without drafts."""
    return 1 + (length > 0) * cost.fixed + length * cost.each


def tokens_per_time(length: int, rate: float, cost: DraftCost, rng: random.Random, steps: int = 20_000) -> float:
    """What steps with so many drafts bring, drawn one by one."""
    tokens = sum(1 + num_kept(length, rate, rng) for _ in range(steps))
    return tokens / (steps * step_time(length, cost))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("fixed", [0.0, 0.2])
@pytest.mark.parametrize("each", [0.02, 0.1, 0.3, 1.0])
def test_no_other_length_brings_more(rate: float, fixed: float, each: float) -> None:
    rng = random.Random(1)
    cost = DraftCost(fixed, each)
    found = best_length(rate, cost, 7)
    rates = [tokens_per_time(length, rate, cost, rng) for length in range(8)]
    assert rates[found] >= max(rates) * 0.96  # 3 % is what drafts must gain, 1 % the noise of the simulation


def test_no_drafts_where_they_do_not_pay() -> None:
    assert best_length(0.9, DraftCost(0.0, 1.0), 7) == 0
    assert best_length(0.02, DraftCost(0.0, 0.02), 7) == 0
    assert best_length(0.3, DraftCost(0.5, 0.01), 7) == 0
    assert best_length(0.02, DraftCost(0.0, 0.02), 7, least=1) == 1
    assert best_length(0.99, DraftCost(0.0, 0.02), 3) == 3
    assert best_length(1.0, DraftCost(0.0, 0.0), 7) == 7


def test_rates_follow_what_was_kept_lately() -> None:
    rates = KeptRates()
    for _ in range(10):
        rates.learn(2, 3, ends_wrong=False)
    assert rates.rate(2) > 0.9
    assert rates.rate(1) == 0.6
    for _ in range(40):
        rates.learn(2, 0, ends_wrong=True)
    assert rates.rate(2) < 0.1


def test_the_first_drafts_count_alike() -> None:
    rates, rng, found = KeptRates(), random.Random(2), []
    for kind in range(400):
        for _ in range(8):
            rates.learn(kind, is_right := int(rng.random() < 0.6), ends_wrong=not is_right)
        found.append(rates.rate(kind))
    assert statistics.fmean(found) == pytest.approx(0.6, abs=0.02)
    assert statistics.pstdev(found) < 0.6 * (0.6 * 0.4) ** 0.5 / 8**0.5 * 1.25  # of 8 draws and 4 of what is expected


def learned(times: StepTimes, *steps: tuple[int, float], repeat: int = 3) -> DraftCost:
    """The cost, once each of the steps, of so many drafts and that time, has been there three times."""
    for num_drafts, seconds in steps * repeat:
        times.learn(1, num_drafts, seconds)
    return times.cost


def test_the_cost_is_a_line_through_the_times() -> None:
    times = StepTimes()
    assert not times.knows(1)
    times.learn(1, 3, 1.0)  # there is nothing to compare with
    for seconds in (0.010, 0.010, 0.5, 0.010):  # a pause does not count
        times.learn(1, 0, seconds)
    assert learned(times, (7, 0.015), repeat=2) == FIRST_COST
    assert not times.is_measured
    assert learned(times, (7, 0.015), repeat=1) == pytest.approx((0.25, 0.25 / 7))  # half of it is fixed
    assert times.is_measured
    assert learned(times, (1, 0.013)) == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))
    times.learn(1, 7, 0.9)  # nor does a pause here
    times.learn(1, 4, 0.9)  # once is not enough
    assert times.cost == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))
    assert learned(times, (4, 0.014), (4, 0.014)) == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))


def test_noise_in_the_times_says_nothing_absurd() -> None:
    falling = StepTimes()
    assert learned(falling, (0, 0.010), (1, 0.015), (2, 0.013)) == pytest.approx((0.4, 0.0))
    below = StepTimes()
    assert learned(below, (0, 0.010), (1, 0.0101), (2, 0.012)) == pytest.approx((0.0, (0.01 + 0.4) / 5))
    fast = StepTimes()
    assert learned(fast, (0, 0.010), (1, 0.008)) == (0.0, 0.0)


def test_old_times_are_forgotten() -> None:
    times = StepTimes()
    learned(times, (0, 0.010), (7, 0.080))
    assert learned(times, (2, 0.012), repeat=127).fixed == 0  # through 7 it begins below zero
    assert times.cost.each > 0.5
    assert learned(times, (2, 0.012), repeat=1) == pytest.approx((0.1, 0.05))


@pytest.mark.parametrize("rate", [0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(
    "cost", [DraftCost(0.15, 0.04), DraftCost(0.0, 0.1), DraftCost(0.25, 0.02), DraftCost(0.1, 0.3)]
)
def test_what_is_learned_brings_what_is_best(rate: float, cost: DraftCost) -> None:
    """Times have noise, each number of drafts is slow at first, and now and then the machine pauses."""
    rng, tokens, spent = random.Random(3), 0, 0.0
    for _ in range(40):
        rates, times, seen = KeptRates(), StepTimes(), set[int]()
        for number in range(200):
            length = best_length(rates.rate(0), times.cost, 7 if times.is_measured else 1) if number > 8 else 0
            judged = max(length, 1)  # as what is free to guess is judged
            right = num_kept(judged, rate, rng)
            rates.learn(0, right, ends_wrong=right < judged)
            pause = 3.0 * (length not in seen or rng.random() < 0.03)
            time = step_time(length, cost)
            times.learn(1, length, time * rng.gauss(1, 0.02) + pause)
            seen.add(length)
            if number >= 16:  # the first ones have no drafts, or one
                tokens, spent = tokens + 1 + min(right, length), spent + time
    best = max(tokens_per_time(length, rate, cost, rng) for length in range(8))
    assert tokens / spent > 0.88 * best
