"""How many drafts a step is worth: the one rule, from how often drafts were right and from what they cost.

With a chance p that a draft is right if those before it were, k drafts give 1 + p + ... + p^k tokens a step. They cost
1 + f + k * s steps: s is the share of a step's time that each adds, f what a step with drafts takes beyond that, as
the host reads it before it queues the next. k is the number with the most tokens for the time; 0 where it gains less
than LEAST_GAIN.

f and s are a line through the latest times of each number of drafts. With s alone, a share of the few drafts that a
step had lately, short steps seem dear and long ones are not tried.
"""

from collections import deque
from statistics import fmean, median
from typing import NamedTuple

LEAST_GAIN = 1.03
_FIRST_RATE = 0.6  # p before anything is known
_FIRST_RATE_WEIGHT = 4  # as so many drafts
_RATE_WEIGHT = 1 / 12  # of the latest draft, at least
_FEW_TIMES = 3  # the first step of a kind is slow, and a single one may be far off on a busy machine
_NUM_TIMES = 8  # the latest times count, by their median
_RECENT = 128  # steps with drafts; a number of drafts that none of these had does not count


class DraftCost(NamedTuple):
    """What drafts add to a step, in steps: `fixed` with any, and `each`."""

    fixed: float
    each: float


FIRST_COST = DraftCost(0.0, 0.05)  # before anything is known; the first drafts measure it


def best_length(rate: float, cost: DraftCost, most: int, least: int = 0) -> int:
    """The number of drafts, `least` to `most`, that gives the most tokens for the time."""
    best, best_gain = least, LEAST_GAIN if least == 0 else 0.0
    tokens = 1.0
    for length in range(1, most + 1):
        tokens += rate**length
        gain = tokens / (1 + cost.fixed + length * cost.each)
        if length >= least and gain > best_gain:
            best, best_gain = length, gain
    return min(best, most)


class KeptRates:
    """How often drafts were right lately, by their kind."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def rate(self, kind: int) -> float:
        """The chance that a draft is right if those before it were."""
        return self._rates.get(kind, _FIRST_RATE)

    def learn(self, kind: int, num_right: int, *, ends_wrong: bool) -> None:
        """Learn from drafts of which the first `num_right` were right; with `ends_wrong` the next one was not."""
        rate, count = self.rate(kind), self._counts.get(kind, _FIRST_RATE_WEIGHT)
        for is_right in (*[1.0] * num_right, *[0.0] * ends_wrong):
            count += 1
            rate += max(1 / count, _RATE_WEIGHT) * (is_right - rate)
        self._rates[kind], self._counts[kind] = rate, count


class StepTimes:
    """What drafts cost. Steps are compared with those of as many rows without drafts.

    Attributes: cost, of drafts
    """

    def __init__(self) -> None:
        self.cost = FIRST_COST
        self._plain: dict[int, deque[float]] = {}
        self._added: dict[int, _Added] = {}  # by the number of drafts
        self._num_steps = 0  # with drafts

    def knows(self, num_rows: int) -> bool:
        """Whether a step of so many rows without drafts has been measured."""
        return num_rows in self._plain

    @property
    def is_measured(self) -> bool:
        """Whether enough steps with drafts have been measured."""
        return self.cost is not FIRST_COST

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn a step's time."""
        if num_drafts == 0:
            self._plain.setdefault(num_rows, deque(maxlen=_NUM_TIMES)).append(seconds)
        elif self.knows(num_rows):
            self._num_steps += 1
            added = self._added.setdefault(num_drafts, _Added())
            added.learn(seconds / median(self._plain[num_rows]) - 1, self._num_steps)
            places = [(float(count), one.share) for count, one in self._added.items() if self._counts(one)]
            if places:
                self.cost = _line(places)

    def _counts(self, added: "_Added") -> bool:
        return len(added.shares) >= _FEW_TIMES and added.latest > self._num_steps - _RECENT


class _Added:
    """What steps with one number of drafts have taken beyond a step without.

    Attributes: shares: of the latest steps; share: their median; latest: the number of the latest step
    """

    def __init__(self) -> None:
        self.shares: deque[float] = deque(maxlen=_NUM_TIMES)
        self.share = 0.0
        self.latest = 0

    def learn(self, share: float, number: int) -> None:
        self.shares.append(share)
        self.share = median(self.shares)
        self.latest = number


def _line(places: list[tuple[float, float]]) -> DraftCost:
    """The line with the least squares of distances; where it falls or begins below zero, the best one that does not.

    Of one place half is taken as fixed, so that a step with more drafts is tried.
    """
    counts, shares = zip(*places, strict=True)
    count, share = fmean(counts), fmean(shares)
    if len(places) == 1:
        return DraftCost(max(share, 0.0) / 2, max(share, 0.0) / 2 / count)
    each = sum((one - count) * other for one, other in places) / sum((one - count) ** 2 for one in counts)
    fixed = share - each * count
    if fixed < 0:
        fixed, each = 0.0, sum(one * other for one, other in places) / sum(one * one for one in counts)
    elif each < 0:
        fixed, each = share, 0.0
    return DraftCost(max(fixed, 0.0), max(each, 0.0))
