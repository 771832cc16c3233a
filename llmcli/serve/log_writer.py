"""`LogWriter`: writes the log in a thread of its own. A log that nobody reads must not stop the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_MOST_CHARACTERS = 16 * 1024**2  # that wait
_CLOSE_SECONDS = 2.0


class LogWriter:
    """See the module. Lines that find no room are counted, and the log says how many are missing."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._num_missing = 0
        self._num_queued = 0  # characters, which `log` counts
        self._num_written = 0  # which the thread counts
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def log(self, line: str) -> None:
        """Queue a line. Never waits. For one thread."""
        if self._num_queued - self._num_written > _MOST_CHARACTERS:
            self._num_missing += 1
            return
        if self._num_missing:
            self._put(f"{self._num_missing} lines are missing here, as nobody read the log")
            self._num_missing = 0
        self._put(line)

    def close(self) -> bool:
        """Write what is queued. False if nobody reads it: then the thread is stuck for good."""
        self._lines.put(None)
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _put(self, line: str) -> None:
        self._num_queued += len(line)
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            self._num_written += len(line)
