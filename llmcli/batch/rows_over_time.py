"""How many rows a batch used, from the beginning of a run to its end."""

from bisect import bisect_right

_MOST_SAMPLES = 2000


class RowsOverTime:
    """Counts of steps and rows at some times of a run. However long the run, it keeps a few thousand."""

    def __init__(self) -> None:
        self._seconds, self._steps, self._row_steps = [0.0], [0], [0]
        self._interval = 0.0  # between two samples, at least

    def note(self, seconds: float, steps: int, row_steps: int) -> None:
        """Take in the counts so far; `row_steps` is the sum over steps of the rows in use."""
        if seconds - self._seconds[-1] < self._interval:
            return
        self._seconds.append(seconds)
        self._steps.append(steps)
        self._row_steps.append(row_steps)
        if len(self._seconds) > _MOST_SAMPLES:
            del self._seconds[1::2], self._steps[1::2], self._row_steps[1::2]
            self._interval = 2 * seconds / _MOST_SAMPLES

    def means(self, num_parts: int) -> list[float]:
        """The mean number of rows in each of so many equal parts of the run; 0 where no step ended."""
        ends = [self._seconds[-1] * part / num_parts for part in range(num_parts + 1)]
        places = [bisect_right(self._seconds, end) - 1 for end in ends]
        steps, row_steps = ([counts[place] for place in places] for counts in (self._steps, self._row_steps))
        return [
            (row_steps[part + 1] - row_steps[part]) / max(steps[part + 1] - steps[part], 1) for part in range(num_parts)
        ]
