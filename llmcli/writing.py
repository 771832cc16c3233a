"""Writes a file whole or not at all, and never over anything but a regular file of the writer's own kind."""

import errno
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self

from filelock import FileLock, Timeout

from llmcli.errors import CheckpointError, OutputError, UsageError
from llmcli.reading import EXPORT_LOCK

_HEAD_BYTES = 4096  # enough of a file to know its kind
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class OutputFile:
    """A kind of file that this program writes where the user says.

    `what` names it with its article, such as "a saved conversation"; `is_own` recognizes one by its first 4,096 bytes;
    `remedy` says how to replace a file, or how to name another.
    """

    what: str
    is_own: Callable[[bytes], bool]
    remedy: str
    mode: int = 0o666

    def check(self, path: Path, *, replace: bool) -> None:
        """Refuse a target before any work is done for it.

        Raises: UsageError for a path that cannot be written, holds anything but a regular file of this kind, or,
        unless `replace`, exists.
        """
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            self._check_folder(path)
            return
        except (OSError, ValueError) as error:
            raise self._refusal(path, error) from error
        if not stat.S_ISREG(info.st_mode):
            found = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}.get(
                stat.S_IFMT(info.st_mode), "a device or pipe"
            )
            raise UsageError(f"{path} is {found}, not a regular file; name another file")
        try:
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise self._refusal(path, error) from error
        if not self.is_own(head):
            raise UsageError(f"{path} exists and is not {self.what}; name another file")
        if not replace:
            raise UsageError(f"{path} exists; {self.remedy}")
        self._check_folder(path)

    def write(self, path: Path, content: bytes, *, replace: bool) -> None:
        """Write the file. A kill at any moment leaves the old file or the new one.

        Raises: UsageError as `check`; OutputError if the disk is full or fails.
        """
        self.check(path, replace=replace)
        try:
            with whole_file(path, self.mode, replace=replace) as file:
                file.write(content)
        except FileExistsError as error:  # made by somebody since the check
            raise UsageError(f"{path} exists; {self.remedy}") from error
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error

    def _check_folder(self, path: Path) -> None:
        folder = path.parent
        if not folder.is_dir():
            raise UsageError(f"{path} cannot be written: {folder} is not a folder; name a file in a folder that exists")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"{path} cannot be written: Permission denied; name a file in a folder that you can write to"
            )

    def _refusal(self, path: Path, error: OSError | ValueError) -> UsageError:
        reason = error.strerror if isinstance(error, OSError) else error
        return UsageError(f"{str(path)!r} cannot be written: {reason}; name another file")


@contextmanager
def whole_file(path: Path, mode: int = 0o666, *, replace: bool = True) -> Iterator[BinaryIO]:
    """A new file that gets the name `path` at the end of the `with`. A kill leaves the old file or the new one.

    Raises: OSError; FileExistsError if the name is not free, unless `replace`
    """
    descriptor, temporary = tempfile.mkstemp(prefix=".llmcli-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode & ~_umask())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            _move_to_new(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _move_to_new(temporary: str, path: Path) -> None:
    """Rename, but only to a name that is free. Raises: FileExistsError."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # a file system without hard links: a gap between look and rename remains
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.replace(temporary, path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Keeps a second process out of the destination of an export or a batch, until the first ends.
#
# The operating system holds the lock and drops it when the process ends, however it ends. The lock is on the hidden
# file `.NAME.lock` next to the destination. Its text only shows others who holds it: a file left by a killed run locks
# nothing. The file is removed while it is still locked; a process that opened it before sees that it has no name, and
# opens a new one.
#
# Readers are not kept out. Replacing is two renames: a reader between them finds no folder, and one that is still
# opening a model's files then gets the new ones.

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
        """Release the lock; the last of several releases removes its file.

        Raises: OSError.
        """
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
