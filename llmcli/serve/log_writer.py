"""`LogWriter`: writes the log in a thread of its own. A log that nobody reads must not stop the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_MOST_LINES = 10_000  # that wait
_CLOSE_SECONDS = 2.0


class LogWriter:
    """See the module. Lines that find no room are counted, and the log says how many are missing."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._lines: SimpleQueue[Callable[[], str] | None] = SimpleQueue()
        self._num_missing = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def log(self, line: Callable[[], str]) -> None:
        """Queue a line, which the thread makes. Never waits. For one thread."""
        if self._lines.qsize() >= _MOST_LINES:
            self._num_missing += 1
            return
        if self._num_missing:
            missing, self._num_missing = self._num_missing, 0
            self._lines.put(lambda: f"{missing} lines are missing here, as nobody read the log")
        self._lines.put(line)

    def close(self) -> bool:
        """Write what is queued. False if nobody reads it: then the thread is stuck for good."""
        self._lines.put(None)
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line())
