"""Keeps the conversation of a terminal as it goes: a file of its own in the user's chat folder, held by a lock.

A chat that goes on with a file which another one holds gets a file of its own, so that no two chats write one file.
Refuses a folder that cannot be made, and to keep a conversation in which nothing was said.
"""

import time
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from llmcli.cli.terminal import terminal
from llmcli.engine.conversation_file import SavedConversation, save_conversation
from llmcli.errors import UsageError


class Keeper:
    """The file of one chat; `path` is None before anything was kept. It is this chat's until `close`, or a kill."""

    def __init__(self, folder: Path):
        self.path: Path | None = None
        self._folder = folder
        self._lock: FileLock | None = None

    def continue_last(self) -> Path:
        """The file that was written last, to go on with; it becomes this chat's, unless another holds it.

        Raises: UsageError if there is none.
        """
        files = [path for path in self._folder.glob("*.json") if path.is_file()]
        if not files:
            raise UsageError(f"--continue: no conversation in {self._folder} yet")
        last = max(files, key=_written)
        try:
            if not self._take(last):
                terminal.info(f"{last} is open in another chat: this one is saved in a new file")
        except UsageError as error:
            terminal.warn(str(error))
        return last

    def save(self, saved: SavedConversation) -> None:
        """Write the file as it is now.

        Raises: UsageError or OutputError if that fails.
        """
        if self.path is None:
            if not saved.conversation.turns:
                return
            self._take_new()
        assert self.path is not None
        save_conversation(self.path, saved, replace=True)

    def close(self) -> None:
        """Let other chats go on with the file."""
        if self._lock is not None:
            # Before the release: who waits for the lock of a file that is gone finds out, and makes another.
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def _take(self, path: Path) -> bool:
        """Make a file this chat's; False if another chat holds it.

        Raises: UsageError if it cannot be locked.
        """
        lock = FileLock(path.with_suffix(".lock"), mode=0o600)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as error:
            raise _refusal(self._folder, error) from error
        self.path, self._lock = path, lock
        return True

    def _take_new(self) -> None:
        make_chat_folder(self._folder)
        started = time.strftime("%Y-%m-%d-%H%M%S")
        for number in count(1):
            path = self._folder / (f"{started}.json" if number == 1 else f"{started}-{number}.json")
            if not path.exists() and self._take(path):
                return


def make_chat_folder(folder: Path) -> None:
    """Make the user's chat folder, readable only by its owner.

    Raises: UsageError if that fails.
    """
    if folder.parts[:1] == ("~",):  # what platformdirs makes of a user without a home
        raise UsageError("cannot save conversations: there is no home folder; set HOME or LLMCLI_HOME")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _refusal(folder, error) from error


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # removed since
        return 0


def _refusal(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot save conversations in {folder}: {error.strerror}; set LLMCLI_HOME to a folder that you can write to"
    )
