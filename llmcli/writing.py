"""Writes a file whole or not at all, and never over anything but a regular file of the writer's own kind."""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmcli.errors import OutputError, UsageError

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
