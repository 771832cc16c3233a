"""The rule for the number of drafts in a step, against simulations of steps."""

import random
import statistics
from collections.abc import Sequence

import pytest

from llmcli.engine.draft_sources import NgramIndex, NgramSource
from llmcli.engine.drafts import FIRST_COST, DraftCost, KeptRates, StepTimes, best_length
from llmcli.sampling.params import Sampler, SamplingParams


def num_kept(length: int, rate: float, rng: random.Random) -> int:
    """The number of right drafts in a step before the first wrong one."""
    return next((place for place in range(length) if rng.random() >= rate), length)


def step_time(length: float, cost: DraftCost) -> float:
    """A step's time, in steps without drafts."""
    return 1 + (length > 0) * cost.fixed + length * cost.each


def tokens_per_time(length: int, rate: float, cost: DraftCost) -> float:
    """The tokens per time with this number of drafts: each counts if it and those before it are right."""
    return sum(rate**place for place in range(length + 1)) / step_time(length, cost)


def test_steps_drawn_one_by_one_have_that_many_tokens() -> None:
    rng, cost = random.Random(1), DraftCost(0.2, 0.1)
    for length, rate in ((0, 0.5), (3, 0.3), (7, 0.95)):
        drawn = statistics.fmean(1 + num_kept(length, rate, rng) for _ in range(10_000)) / step_time(length, cost)
        assert drawn == pytest.approx(tokens_per_time(length, rate, cost), rel=0.02)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("fixed", [0.0, 0.2])
@pytest.mark.parametrize("each", [0.02, 0.1, 0.3, 1.0])
def test_no_other_length_brings_more(rate: float, fixed: float, each: float) -> None:
    cost = DraftCost(fixed, each)
    rates = [tokens_per_time(length, rate, cost) for length in range(8)]
    assert rates[best_length(rate, cost, 7)] >= max(rates) * 0.97  # what drafts must gain


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


def learned(times: StepTimes, *steps: tuple[int, float], repeat: int = 4) -> DraftCost:
    """The cost after steps in turns, each with its number of drafts and its time, repeated `repeat` times."""
    for num_drafts, seconds in steps * repeat:
        times.learn(num_drafts, seconds)
    return times.cost


def test_the_cost_is_a_line_through_the_times() -> None:
    times = StepTimes(1)
    assert not times.knows_plain
    times.learn(3, 1.0)  # there is nothing to compare with
    for seconds in (0.010, 0.010, 0.5, 0.010):  # a pause does not count
        times.learn(0, seconds)
    assert learned(times, (7, 0.015), repeat=3) == FIRST_COST
    assert not times.is_measured
    assert learned(times, (7, 0.015), repeat=1) == pytest.approx((0.25, 0.25 / 7))  # half of it is fixed
    assert times.is_measured
    assert learned(times, (1, 0.013)) == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))
    times.learn(7, 0.9)  # nor does a pause here
    times.learn(4, 0.9)  # once is not enough
    assert times.cost == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))
    assert learned(times, (4, 0.014)) == pytest.approx((0.3 - 0.2 / 6, 0.2 / 6))


def test_a_draft_of_each_text_adds_to_the_step() -> None:
    times = StepTimes(3)
    assert learned(times, (0, 0.010), (3, 0.0150), (6, 0.0180)) == pytest.approx((0.2, 0.3))


def test_noise_in_the_times_says_nothing_absurd() -> None:
    falling = StepTimes(1)
    assert learned(falling, (0, 0.010), (1, 0.015), (2, 0.013)) == pytest.approx((0.4, 0.0))
    below = StepTimes(1)
    assert learned(below, (0, 0.010), (1, 0.0101), (2, 0.012)) == pytest.approx((0.0, (0.01 + 0.4) / 5))
    fast = StepTimes(1)
    assert learned(fast, (0, 0.010), (1, 0.008)) == (0.0, 0.0)


def test_old_times_are_forgotten() -> None:
    times = StepTimes(1)
    learned(times, (0, 0.010))
    learned(times, (7, 0.080))
    assert learned(times, (2, 0.012), repeat=511).fixed == 0  # through 7 it begins below zero
    assert times.cost.each > 0.5
    assert learned(times, (2, 0.012), repeat=1) == pytest.approx((0.1, 0.05))
    assert learned(times, (7, 0.013), repeat=3) == pytest.approx((0.1, 0.05))  # nor do they come back
    assert learned(times, (7, 0.013), repeat=1) == pytest.approx((0.16, 0.02))


def test_what_did_not_pay_is_measured_again() -> None:
    """A busy moment of the machine costs the gain of some texts, not of all later ones."""
    times = StepTimes(1)
    learned(times, (0, 0.010), (1, 0.050))
    assert best_length(0.95, times.cost, 7) == 0
    assert learned(times, (0, 0.010), repeat=511).each > 1
    assert learned(times, (0, 0.010), repeat=1) == FIRST_COST
    assert not times.is_measured
    assert best_length(0.95, learned(times, (1, 0.012)), 7) == 7


COSTS = [(1, (0.15, 0.04)), (1, (0.0, 0.1)), (1, (0.25, 0.02)), (1, (0.1, 0.3))]
COSTS += [(2, (0.15, 0.1)), (4, (0.1, 0.25)), (4, (0.0, 1.0))]
# Each cost with one of the rates; with all of them by --all.
LEARNED = [
    pytest.param(rate, num_rows, DraftCost(*cost), marks=[pytest.mark.long] if (place + at) % 3 else [])
    for place, (num_rows, cost) in enumerate(COSTS)
    for at, rate in enumerate((0.5, 0.7, 0.9))
]


@pytest.mark.parametrize(("rate", "num_rows", "cost"), LEARNED)
def test_what_is_learned_brings_what_is_best(rate: float, num_rows: int, cost: DraftCost) -> None:
    """Times have noise, each number of drafts is slow at first, and now and then the machine pauses.

    All texts of a step are alike, and a draft of each costs `cost.each`.
    """
    rng, tokens, spent, found = random.Random(3), 0, 0.0, []
    most = 8 // num_rows - 1
    best = max(tokens_per_time(length, rate, cost) for length in range(most + 1))
    for _ in range(60):
        rates, times, seen = [KeptRates() for _ in range(num_rows)], StepTimes(num_rows), set[int]()
        tokens_then, spent_then = tokens, spent
        for number in range(200):
            lengths = [
                best_length(of_text.rate(0), times.cost, most if times.is_measured else 1) if number > 8 else 0
                for of_text in rates
            ]
            kept = 0
            for length, of_text in zip(lengths, rates, strict=True):
                judged = max(length, 1)  # as free guesses are judged
                right = num_kept(judged, rate, rng)
                of_text.learn(0, right, ends_wrong=right < judged)
                kept += min(right, length)
            num_drafts = sum(lengths)
            time = step_time(num_drafts / num_rows, cost)
            pause = 3.0 * (num_drafts not in seen or rng.random() < 0.03)
            times.learn(num_drafts, time * rng.gauss(1, 0.02) + pause)
            seen.add(num_drafts)
            if number >= 16:  # the first ones have no drafts, or one
                tokens, spent = tokens + num_rows + kept, spent + time * num_rows
        found.append((tokens - tokens_then) / (spent - spent_then))
    assert tokens / spent > 0.88 * best
    assert sum(one < 0.75 * best for one in found) <= 3


# The n-gram index against a search through the whole text.


SAMPLER = Sampler(SamplingParams(), seed=0)


def longest_match(token_ids: Sequence[int], most: int = 32) -> tuple[int, int]:
    """The latest place after the longest earlier repetition of the text's end; (0, 0) if it is shorter than 2."""
    best = (0, 0)
    for place in range(1, len(token_ids)):
        length = 0
        while length < min(place, most) and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        if length >= max(best[1], 2):
            best = (place, length)
    return best


@pytest.mark.parametrize("num_words", [2, 4, 30, 1000])
def test_finds_the_longest_match(num_words: int) -> None:
    """The longest of the latest 16 with the same end; a text of few tokens has more, and the length may be less."""
    rng = random.Random(num_words)
    phrases = [[rng.randrange(num_words) for _ in range(rng.randint(1, 40))] for _ in range(5)]
    index, token_ids, num_matches = NgramIndex(), [], 0
    while len(token_ids) < 400:
        phrase = rng.choice(phrases)[: rng.randint(1, 40)]
        for token_id in phrase:
            token_ids.append(token_id)
            index.extend([token_id])
            expected, found = longest_match(token_ids), index.match()
            if num_words >= 30:
                assert found == expected
            assert found[1] <= expected[1]
            assert (found[1] == 0) == (expected[1] == 0)
            if found[1]:
                place, length = found
                assert token_ids[place - length : place] == token_ids[-length:]
                num_matches += 1
    assert num_matches > 100


def test_the_tokens_behind_a_match() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 6, 1, 2])
    assert index.match() == (2, 2)
    assert index.behind(2, 4) == (3, 4, 5, 6)
    loop = NgramIndex([9, 1, 2, 1, 2, 1, 2])
    assert loop.match() == (5, 4)
    assert loop.behind(5, 7) == (1, 2, 1, 2, 1, 2, 1)


def test_a_shortened_index_is_that_of_the_shorter_text() -> None:
    rng = random.Random(1)
    token_ids = [rng.randrange(5) for _ in range(300)]
    for length in (299, 120, 3, 1, 0):
        index = NgramIndex(token_ids)
        index.shorten(length)
        more = [rng.randrange(5) for _ in range(20)]
        index.extend(more)
        fresh = NgramIndex([*token_ids[:length], *more])
        assert index.token_ids == fresh.token_ids
        assert index.match() == fresh.match()


class CountedList(list[int]):
    """Counts accesses to single items."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        CountedList.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("num_words", [1, 2, 50])
def test_a_token_of_a_long_text_costs_what_one_of_a_short_text_costs(num_words: int) -> None:
    rng = random.Random(1)
    reads = {}
    for length in (1_000, 100_000):
        index = NgramIndex([rng.randrange(num_words) for _ in range(length)])
        index.token_ids = CountedList(index.token_ids)
        CountedList.reads = 0
        for _ in range(20):
            index.extend([rng.randrange(num_words)])
            index.match()
        reads[length] = CountedList.reads
    assert reads[100_000] <= max(1.5 * reads[1_000], 20 * 2 * 16 * 2 * 33)
    assert reads[100_000] <= 20 * 16 * 2 * 2 * 33


def test_the_next_turn_finds_what_the_turn_before_looked_up() -> None:
    source = NgramSource()
    prompt, answer = [5, 6, 7, 8], [1, 2, 3]
    guesses = source.begin(prompt, SAMPLER)
    guesses.extend(answer)
    guesses.close()
    for turn in ([*prompt, *answer, 9, 6, 7], [5, 6, 7, 4, 6, 7], [6, 7, 6, 7]):
        again, fresh = source.begin(turn, SAMPLER), NgramSource().begin(turn, SAMPLER)
        assert (again.kind(), again.guess(2)) == (fresh.kind(), fresh.guess(2))
        again.close()


def test_nothing_matches_nothing() -> None:
    for token_ids in ((), (1,), (1, 2), (1, 2, 3)):
        assert NgramSource().begin(token_ids, SAMPLER).kind() is None
