"""Saves the conversation of a terminal as it goes, in a file of its own in the user's chat folder, held by a lock.

A chat that resumes a file held by another chat gets its own, so no two chats write one file.
Refuses a folder that cannot be made, and does not save an empty conversation.
"""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from llmcli.cli.chat_session.kept_chats import (
    MOST_UNNAMED,
    SUFFIX,
    find_kept,
    is_unnamed,
    kept_paths,
    new_name,
    path_of_name,
    unnamed_paths,
)
from llmcli.cli.terminal import terminal
from llmcli.engine.conversation import CONVERSATION_FILE, SavedConversation, save_conversation
from llmcli.errors import UsageError


class Keeper:
    """The file of one chat; `path` is None before anything was saved. It is this chat's until `close`, or a kill."""

    def __init__(self, folder: Path):
        self.path: Path | None = None
        self._folder = folder
        self._lock: FileLock | None = None

    def continue_last(self) -> Path:
        """The file that was written last, to resume; it becomes this chat's, unless another holds it.

        Raises: UsageError if there is none.
        """
        paths = kept_paths(self._folder)
        if not paths:
            raise UsageError(f"--continue: no conversation in {self._folder} yet; leave it out to start one")
        return self._continue(paths[0])

    def continue_named(self, name: str) -> Path:
        """The file of that name, or of that number in the list, to resume as `continue_last`.

        Raises: UsageError if there is none.
        """
        return self._continue(find_kept(self._folder, name))

    def begin_new(self) -> None:
        """Save what comes next in a new file; the old one stays as it is."""
        self.close()
        self.path = None

    def keep_as(self, name: str, saved: SavedConversation) -> None:
        """Keep this chat under a name from now on, for good. An earlier name keeps its file, too.

        Raises: UsageError for a name that cannot be one or is another chat's, OutputError if the disk is full.
        """
        make_chat_folder(self._folder)
        path, old = path_of_name(self._folder, name), self.path
        if path == old:
            self.save(saved)
            return
        lock = None if os.path.lexists(path) else self._lock_of(path)
        if lock is None:
            raise UsageError(f"another chat is named {name!r}; choose another name")
        try:
            save_conversation(path, saved, replace=False)
        except BaseException:
            _release(lock)
            raise
        if old is not None and is_unnamed(old):
            old.unlink(missing_ok=True)
        self.close()
        self.path, self._lock = path, lock

    def save(self, saved: SavedConversation) -> None:
        """Write the file as it is now. Raises: UsageError or OutputError if that fails"""
        if self.path is None:
            if not saved.conversation.turns:
                return
            self._take_new(new_name(saved.conversation.turns[0].user))
        assert self.path is not None
        save_conversation(self.path, saved, replace=True)

    def close(self) -> None:
        """Let other chats resume the file."""
        if self._lock is not None:
            _release(self._lock)
            self._lock = None

    def _continue(self, path: Path) -> Path:
        try:
            if not self._take(path):
                terminal.info(f"{path} is open in another chat: this one is saved in a new file")
        except UsageError as error:
            terminal.warn(str(error))
        return path

    def _take(self, path: Path) -> bool:
        """Make a file this chat's; False if another chat holds it. Raises: UsageError if it cannot be locked"""
        lock = self._lock_of(path)
        if lock is None:
            return False
        self.path, self._lock = path, lock
        return True

    def _lock_of(self, path: Path) -> FileLock | None:
        """The lock of a file, taken; None if another chat holds it. Raises: UsageError if it cannot be locked"""
        lock = FileLock(path.with_name(f"{path.stem}.lock"), mode=0o600)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None
        except OSError as error:
            raise _refusal(self._folder, error) from error
        return lock

    def _take_new(self, name: str) -> None:
        make_chat_folder(self._folder)
        self._remove_oldest()
        for number in count(1):
            path = self._folder / f"{name}{'' if number == 1 else f'-{number}'}{SUFFIX}"
            if not path.exists() and self._take(path):
                return

    def _remove_oldest(self) -> None:
        """Make room for one more chat without a name; one that is open stays."""
        for path in unnamed_paths(self._folder)[MOST_UNNAMED - 1 :]:
            with suppress(OSError, UsageError):
                with path.open("rb") as file:
                    is_own = CONVERSATION_FILE.is_own(file.read(4096))
                if is_own and (lock := self._lock_of(path)) is not None:
                    path.unlink(missing_ok=True)
                    _release(lock)


def _release(lock: FileLock) -> None:
    # The file before the lock: a chat that waits for the lock of a removed file notices, and makes another.
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def make_chat_folder(folder: Path) -> None:
    """Make the user's chat folder, readable only by its owner. Raises: UsageError if that fails"""
    if folder.parts[:1] == ("~",):  # platformdirs returns this for a user without a home
        raise UsageError("cannot save conversations: there is no home folder; set HOME or LLMCLI_HOME")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _refusal(folder, error) from error


def _refusal(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot save conversations in {folder}: {error.strerror}; set LLMCLI_HOME to a folder that you can write to"
    )
