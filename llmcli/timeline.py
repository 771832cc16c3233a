"""The time of a start: its parts and when they ran, reported by the rooms and shown by the command line."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

IMPORTS = "interpreter and imports"


@dataclass
class Part:
    """The work of one name: its intervals in order, in seconds from the start.

    `is_beside` means work of another thread, in parallel with the parts that are waited for.
    """

    name: str
    is_beside: bool
    note: str = ""
    intervals: list[tuple[float, float]] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """When it first began."""
        return min(self.intervals)[0]

    @property
    def seconds(self) -> float:
        """How long any of it was running; parallel threads count once."""
        total = last = 0.0
        for begin, end in sorted(self.intervals):
            total += max(end - max(begin, last), 0.0)
            last = max(last, end)
        return total


class Timeline:
    """The parts of one thread's work from `age` seconds ago until `finish`. They never overlap.

    Time in a nested part does not count for the outer one. Only `beside` may be used by other threads. A timeline is
    always kept, shown or not: a part costs about a microsecond.
    """

    def __init__(self, age: float = 0.0) -> None:
        self._start = time.perf_counter() - age
        self._end: float | None = None
        self._parts: dict[tuple[str, bool], Part] = {}
        self._open: list[str] = []
        self._since = 0.0  # everything before is counted, for a part or for none

    @property
    def parts(self) -> list[Part]:
        """Every part, by when it first began."""
        return sorted(self._parts.values(), key=lambda part: (part.begin, part.is_beside))

    @property
    def end(self) -> float | None:
        """When `finish` was called, None before that."""
        return self._end

    @property
    def other_seconds(self) -> float:
        """The time up to the end, or until now, outside all parts."""
        end = self.now() if self._end is None else self._end
        return end - sum(part.seconds for part in self._parts.values() if not part.is_beside)

    def now(self) -> float:
        """Seconds since the start; any thread may ask."""
        return time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside for this part."""
        self._close()
        self._open.append(name)
        try:
            yield
        finally:
            self._close()
            self._open.pop()

    def since(self, name: str, begin: float) -> None:
        """Count the time from `begin` until now for this part, instead of the current one."""
        begin = max(begin, self._since)
        now = self.now()
        if self._open:
            self._add(self._open[-1], self._since, begin)
        self._add(name, begin, now)
        self._since = now

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Report the work of another thread inside."""
        begin = self.now()
        try:
            yield
        finally:
            self._add(name, begin, self.now(), is_beside=True)

    def note(self, name: str, text: str) -> None:
        """Add a note to a part that has been reported."""
        if (part := self._parts.get((name, False))) is not None:
            part.note = text

    def finish(self) -> None:
        """End here: later work is not recorded."""
        self._close()
        self._end = self._since

    def _close(self) -> None:
        """Count the time since the last change for the current part."""
        now = self.now()
        if self._open:
            self._add(self._open[-1], self._since, now)
        self._since = now

    def _add(self, name: str, begin: float, end: float, is_beside: bool = False) -> None:
        if self._end is not None or end <= begin:
            return
        intervals = self._parts.setdefault((name, is_beside), Part(name, is_beside)).intervals
        if not is_beside and intervals and intervals[-1][1] == begin:
            begin = intervals.pop()[0]
        intervals.append((begin, end))
