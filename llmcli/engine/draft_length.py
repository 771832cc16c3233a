"""How many drafts a step is worth: the one rule, from how often drafts were right and from what they cost.

With a chance p that a draft is right if those before it were, k drafts give 1 + p + ... + p^k tokens a step. They cost
1 + f + k * s steps: each adds the share s of a step's time, and f is what a step with any adds to that, since it is
queued only once the step before has been read. k is the number with the most tokens for the time; 0 where it gains less
than LEAST_GAIN.

f and s are a line through the latest times of each number of drafts. With s alone, a share of the few drafts that a
step had lately, short steps seem dear and long ones are not tried. In a step of several texts each decides as if all
did what it does: then k drafts of each cost R * k * s, and all R of them get the tokens.
"""

from collections import deque
from statistics import median_low
from typing import NamedTuple

LEAST_GAIN = 1.03
_FIRST_RATE = 0.6  # p before anything is known
_FIRST_RATE_WEIGHT = 4  # as so many drafts
_RATE_WEIGHT = 1 / 12  # of the latest draft, at least
_FEW_TIMES = 4  # the first step of a kind is slow, and one of the others may be far off on a busy machine
_NUM_TIMES = 8  # the latest times count, by their median
_RECENT = 512  # steps, after which a time is forgotten: a wrong one costs no more than that


class DraftCost(NamedTuple):
    """What drafts add to a step, in steps: `fixed` with any, and `each` of a text's."""

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
    """What drafts cost in steps of one number of rows.

    Attributes: cost, of a text's drafts if all texts have as many
    """

    def __init__(self, num_rows: int):
        self.cost = FIRST_COST
        self._num_rows = num_rows
        self._plain = _Latest()
        self._added: dict[int, _Latest] = {}  # by the number of drafts: what they added, as a share of a step without
        self._num_steps = 0
        self._latest = 0  # the number of the latest step with drafts

    @property
    def knows_plain(self) -> bool:
        """Whether a step without drafts has been measured."""
        return self._plain.median > 0

    @property
    def is_measured(self) -> bool:
        """Whether enough steps with drafts have been measured lately."""
        return self.cost is not FIRST_COST

    def learn(self, num_drafts: int, seconds: float) -> None:
        """Learn the time of a step with so many drafts, of all its texts."""
        self._num_steps += 1
        since = self._num_steps - _RECENT
        if num_drafts == 0:
            self._plain.learn(seconds, self._num_steps)
            if self._latest <= since:  # where drafts did not pay for so long, it is time to measure them again
                self.cost = FIRST_COST
        elif self.knows_plain:
            self._latest = self._num_steps
            added = self._added.get(num_drafts)
            if added is None or added.number <= since:
                added = self._added[num_drafts] = _Latest()
            added.learn(seconds / self._plain.median - 1, self._num_steps)
            places = [(count, one.median) for count, one in self._added.items() if one.counts and one.number > since]
            if places:
                fixed, each = _line(places)
                self.cost = DraftCost(fixed, each * self._num_rows)


class _Latest:
    """The latest of some measures. Attributes: median; number, of the step measured last"""

    def __init__(self) -> None:
        self.median = 0.0
        self.number = 0
        self._values: deque[float] = deque(maxlen=_NUM_TIMES)

    @property
    def counts(self) -> bool:
        """Whether there are enough."""
        return len(self._values) >= _FEW_TIMES

    def learn(self, value: float, number: int) -> None:
        """Take a measure, of the step with this number."""
        self._values.append(value)
        self.number = number
        self.median = median_low(self._values)


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
