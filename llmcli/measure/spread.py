"""`Spread`: the times of several runs of the same."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Seconds of several runs of the same."""

    median: float
    fastest: float
    slowest: float
    num_runs: int

    def overlaps(self, other: "Spread") -> bool:
        """Whether some run of one took as long as some run of the other."""
        return self.fastest <= other.slowest and other.fastest <= self.slowest


def spread_of(times: Sequence[float]) -> Spread:
    """Their median and their ends."""
    return Spread(statistics.median(times), min(times), max(times), len(times))
