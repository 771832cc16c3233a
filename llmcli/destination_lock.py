"""Keeps a second process out of the destination of an export or a batch, until the first ends.

The operating system holds the lock and drops it when the process ends, however it ends. The lock is on the hidden file
`.NAME.lock` next to the destination. Its text only shows others who holds it: a file left by a killed run locks
nothing. The file is removed while it is still locked; a process that opened it before sees that it has no name, and
opens a new one.

Readers are not kept out. Replacing is two renames: a reader between them finds no folder, and one that is still opening
a model's files then gets the new ones.
"""

import errno
import os
import platform
import re
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from llmcli.errors import CheckpointError, UsageError
from llmcli.reading import EXPORT_LOCK
from llmcli.writing import OutputFile

_NUM_LOOKS = 20
_SECONDS_BETWEEN_LOOKS = 0.05
_TEXT = re.compile(r"llmcli (?:quantize|batch): (process \d+ on [\w.-]+ since [\d-]+ [\d:]+ UTC)\n", re.ASCII)


def _is_lock(head: bytes) -> bool:
    return not head or _TEXT.fullmatch(head.decode("ascii", "replace")) is not None


_LOCK_FILE = OutputFile("a lock of llmcli", _is_lock, "remove it")


class DestinationLock:
    """The lock of one destination, whose folder's path has no links in it. Its holder may acquire it again.

    `command` writes there; `what` it writes is named to the second process.
    """

    def __init__(self, destination: Path, command: str = "quantize", what: str = "folder"):
        self._destination = destination
        self._what = what
        self._path = destination.with_name(f".{destination.name}.lock")
        # Only a real lock: a file that locks by its existence would outlive a kill.
        self._lock = FileLock(
            self._path,
            blocking=False,
            thread_local=False,
            fallback_to_soft=False,
            on_acquired=partial(_write_holder, command),
        )

    def acquire(self) -> None:
        """Take the lock, or report who has it.

        Raises: UsageError if another process holds it, or its file is somebody's own; OSError.
        """
        if not self._lock.is_locked and os.path.lexists(self._path):
            _LOCK_FILE.check(self._path, replace=True)
        holder = None
        for _ in range(_NUM_LOOKS):
            try:
                self._lock.acquire()
                return
            except Timeout:
                holder = self._holder()
            if holder is not None:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # it is being taken or released right now
        if holder is None and not os.path.lexists(self._path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))  # as in /proc
        raise UsageError(
            f"{self._destination} is being written by {holder or 'another process'}; "
            f"wait until that has ended, or give another {self._what}"
        )

    def release(self) -> None:
        """Release the lock; the last of several releases removes its file. Raises: OSError."""
        if self._lock.lock_counter == 1:
            with suppress(OSError):  # Windows removes no open file; there filelock does it
                self._path.unlink()
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _holder(self) -> str | None:
        """The holder of the lock by its file; None if the file is empty or gone."""
        try:
            match = _TEXT.fullmatch(EXPORT_LOCK.read_text(self._path))
        except CheckpointError:
            return None
        return match[1] if match else None


def _write_holder(command: str, descriptor: int) -> None:
    host = re.sub(r"[^\w.-]", "_", platform.node(), flags=re.ASCII) or "localhost"
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"llmcli {command}: process {os.getpid()} on {host} since {since}\n".encode())
