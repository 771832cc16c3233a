"""How many drafts a step is worth: the one rule, from how often drafts were right and from what they cost.

With a chance p that a draft is right if those before it were, k drafts give 1 + p + ... + p^k tokens a step. They cost
1 + f + k * s steps: s is the share of a step's time that each adds, f what a step with drafts takes beyond that, as
the host reads it before it queues the next. k is the number with the most tokens for the time; 0 where it gains less
than LEAST_GAIN.

f and s are a line through the latest times of each number of drafts. With s alone, a share of the few drafts that a
step had lately, short steps seem dear and long ones are not tried.
"""

from collections import deque
from statistics import median
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
        self._plain: dict[int, _Latest] = {}  # by the number of rows: seconds
        self._added: dict[int, _Latest] = {}  # by the number of drafts: what they added, as a share of a step without
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
            self._plain.setdefault(num_rows, _Latest()).learn(seconds, 0)
        elif self.knows(num_rows):
            self._num_steps += 1
            share = seconds / self._plain[num_rows].median - 1
            self._added.setdefault(num_drafts, _Latest()).learn(share, self._num_steps)
            since = self._num_steps - _RECENT
            places = [(count, one.median) for count, one in self._added.items() if one.is_known_since(since)]
            if places:
                self.cost = _line(places)


class _Latest:
    """The latest of some measures. Attributes: median"""

    def __init__(self) -> None:
        self.median = 0.0
        self._values: deque[float] = deque(maxlen=_NUM_TIMES)
        self._number = 0

    def learn(self, value: float, number: int) -> None:
        """Take a measure, of the step with this number."""
        self._values.append(value)
        self._number = number
        self.median = median(self._values)

    def is_known_since(self, number: int) -> bool:
        """Whether there are enough, the latest of a step behind that number."""
        return len(self._values) >= _FEW_TIMES and self._number > number


def _line(places: list[tuple[int, float]]) -> DraftCost:
    """The line with the least squares of distances; where it falls or begins below zero, the best one that does not.

    Of one place half is taken as fixed, so that a step with more drafts is tried.
    """
    if len(places) == 1:
        ((count, share),) = places
        return DraftCost(max(share, 0.0) / 2, max(share, 0.0) / 2 / count)
    counts = shares = squares = products = 0.0
    for count, share in places:
        counts += count
        shares += share
        squares += count * count
        products += count * share
    num = len(places)
    each = (num * products - counts * shares) / (num * squares - counts * counts)
    fixed = (shares - each * counts) / num
    if fixed < 0:
        fixed, each = 0.0, products / squares
    elif each < 0:
        fixed, each = shares / num, 0.0
    return DraftCost(max(fixed, 0.0), max(each, 0.0))
