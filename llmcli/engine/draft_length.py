"""How many drafts a step is worth: the one rule, from how often drafts were right and from what they cost.

With a chance p that a draft is right if those before it were, k drafts give 1 + p + ... + p^k tokens a step. They cost
1 + k * s steps, s being the share of a step's time that a draft adds. k is the number with the most tokens for the
time; 0 where it gains less than LEAST_GAIN.
"""

from collections import deque
from statistics import median

LEAST_GAIN = 1.03
_FIRST_RATE = 0.6  # p before anything is known
_RATE_WEIGHT = 1 / 8  # of the latest draft
_FIRST_SHARE = 0.05  # s before anything is known; the first drafts measure it
_FEW_TIMES = 3
_NUM_TIMES = 8  # the latest times count, by their median


def best_length(rate: float, share: float, most: int, least: int = 0) -> int:
    """The number of drafts, `least` to `most`, that gives the most tokens for the time."""
    best, best_gain = least, LEAST_GAIN if least == 0 else 0.0
    tokens = 1.0
    for length in range(1, most + 1):
        tokens += rate**length
        gain = tokens / (1 + length * share)
        if length >= least and gain > best_gain:
            best, best_gain = length, gain
    return min(best, most)


class KeptRates:
    """How often drafts were right lately, by their kind."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def rate(self, kind: int) -> float:
        """The chance that a draft is right if those before it were."""
        return self._rates.get(kind, _FIRST_RATE)

    def learn(self, kind: int, num_right: int, *, ends_wrong: bool) -> None:
        """Learn from drafts of which the first `num_right` were right; with `ends_wrong` the next one was not."""
        rate = self.rate(kind)
        for is_right in (*[1.0] * num_right, *[0.0] * ends_wrong):
            rate += _RATE_WEIGHT * (is_right - rate)
        self._rates[kind] = rate


class StepTimes:
    """What drafts cost. Steps are compared with those of as many rows without drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._shares: deque[float] = deque(maxlen=_NUM_TIMES)

    def knows(self, num_rows: int) -> bool:
        """Whether a step of so many rows without drafts has been measured."""
        return num_rows in self._plain

    @property
    def is_measured(self) -> bool:
        """Whether enough steps with drafts have been measured: a single time may be far off on a busy machine."""
        return len(self._shares) >= _FEW_TIMES

    @property
    def share(self) -> float:
        """What a draft adds to a step's time, as a share of it."""
        return max(median(self._shares), 0.0) if self.is_measured else _FIRST_SHARE

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn a step's time."""
        if num_drafts == 0:
            self._plain.setdefault(num_rows, deque(maxlen=_NUM_TIMES)).append(seconds)
        elif self.knows(num_rows):
            plain = median(self._plain[num_rows])
            self._shares.append((seconds / plain - 1) / num_drafts)
