"""The chats that the user's chat folder keeps: their names, which file is meant by one, and `llmcli chat --list`.

A name is that of the file without `.json`. A name that chat gave begins with the date; only those may be
removed when there are many. `Keeper` saves a conversation as it goes, in a file of its own that a lock holds: a chat
that resumes a file held by another chat gets its own, so no two chats write one file.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout
from rich.cells import cell_len

from llmcli.cli.tables import aligned_lines
from llmcli.cli.terminal import columns_of, fact_lines, terminal
from llmcli.engine.conversation import CONVERSATION_FILE, SavedConversation, load_conversation, save_conversation
from llmcli.errors import LLMCliError, UsageError

MOST_UNNAMED = 200  # chats with names of chat's own that are kept
SUFFIX = ".json"
MAX_NAME = 60
MAX_SLUG = 40

_UNNAMED = re.compile(r"\d{4}-\d\d-\d\d-")
# A name of digits and signs alone is a number, a date or a time; one that begins with a date is one of chat's own.
_NO_NAME = re.compile(r"[\d\W_]*|\d{4}-\d\d-\d\d.*")


def kept_paths(folder: Path) -> list[Path]:
    """The files of the folder that may be chats, the one that was written last first."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if path.is_file()), key=_newest_first)


def is_unnamed(path: Path) -> bool:
    """Whether chat gave the name."""
    return _UNNAMED.match(path.name) is not None


def names_file(name: str) -> bool:
    """Whether it means a file, not the name of a kept chat."""
    return "/" in name or "\\" in name or name.endswith(SUFFIX)


def find_kept(folder: Path, name: str) -> Path:
    """The kept chat of that name, or of that number in the list. Raises: UsageError if there is none"""
    paths = kept_paths(folder)
    for number, path in enumerate(paths, start=1):
        if name in (path.stem, str(number)):
            return path
    raise UsageError(
        f"no chat is named {name!r:.80}; `llmcli chat --list` shows all, and a file needs its path, such as ./FILE"
    )


def path_of_name(folder: Path, name: str) -> Path:
    """Where a chat of that name is kept.

    Raises: UsageError for what cannot be one: a number or a date, which would be taken for another chat, or a name
    that cannot be a file's.
    """
    if _NO_NAME.fullmatch(name) or len(name) > MAX_NAME or not name.isprintable() or name[0] in ".-":
        raise UsageError(
            f"{name!r:.80} cannot name a chat; use at most {MAX_NAME} characters with a letter among them, and no date "
            "at the beginning"
        )
    return folder / f"{name}{SUFFIX}"


def new_name(message: str) -> str:
    """A name for a new chat: the date and the first words that were said, or else the time."""
    slug = ""
    for word in re.findall(r"\w+", message.lower()):
        if len(slug) + len(word) > MAX_SLUG:
            break
        slug += f"-{word}"
    return time.strftime("%Y-%m-%d") + (slug or time.strftime("-%H%M%S"))


def first_line(text: str) -> str:
    """The beginning of a text, to recognize it."""
    line = text.strip().split("\n")[0]
    return line if len(line) <= 60 and line == text.strip() else f"{line[:60]}..."


def _newest_first(path: Path) -> tuple[int, str]:
    try:
        return -path.stat().st_mtime_ns, path.name
    except FileNotFoundError:  # removed since
        return 0, path.name


@dataclass(frozen=True)
class KeptChat:
    """One kept chat; `written` is in seconds since 1970."""

    number: int
    path: Path
    written: float
    saved: SavedConversation

    @property
    def name(self) -> str:
        """What `--resume` calls it."""
        return self.path.stem


def kept_chats(folder: Path) -> Iterator[KeptChat]:
    """Every chat, the one that was written last first. What cannot be read is named in a line, and left out."""
    for number, path in enumerate(kept_paths(folder), start=1):
        try:
            yield KeptChat(number, path, path.stat().st_mtime, load_conversation(path))
        except FileNotFoundError:  # removed since
            continue
        except LLMCliError as error:
            terminal.warn(str(error))


def show_list(folder: Path, *, as_json: bool) -> None:
    """Print the chats, the one that was written last first."""
    chats = list(kept_chats(folder))
    if as_json:
        terminal.write_json([_chat_json(chat) for chat in chats])
        return
    if not chats:
        terminal.info(f"no chats in {folder}")
        return
    rows = [("", "NAME", "WHEN", "TURNS", "MODEL", "BEGINS")]
    for chat in chats:
        when = f"{datetime.fromtimestamp(chat.written):%Y-%m-%d %H:%M}"
        turns = chat.saved.conversation.turns
        begins = first_line(turns[0].user) if turns else ""
        rows.append((str(chat.number), chat.name, when, str(len(turns)), chat.saved.model, begins))
    terminal.write(_table(rows))
    terminal.info(f"continue one with `llmcli chat --resume NAME` (or its number); they are kept in {folder}")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns below a heading; on a narrow terminal, separate lines for each chat."""
    lines = aligned_lines(rows, "<" * len(rows[0]))
    if not sys.stdout.isatty() or max(map(cell_len, lines)) <= columns_of(sys.stdout):
        return "".join(f"{line}\n" for line in lines)
    records = []
    for number, name, when, turns, model, begins in rows[1:]:
        count = f"{turns} turn{'' if turns == '1' else 's'}"
        records += [(number, name), ("", f"{when}, {count}, {model}"), ("", begins)]
    return fact_lines(records, max(len(row[0]) for row in rows) + 2, sys.stdout)


def _chat_json(chat: KeptChat) -> dict[str, object]:
    turns = chat.saved.conversation.turns
    return {
        "name": chat.name,
        "path": str(chat.path),
        "written": datetime.fromtimestamp(chat.written).astimezone().isoformat(timespec="seconds"),
        "model": chat.saved.model,
        "num_turns": len(turns),
        "system": chat.saved.conversation.system,
        "first_message": turns[0].user if turns else None,
    }


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
        unnamed = [path for path in kept_paths(self._folder) if is_unnamed(path)]
        for path in unnamed[MOST_UNNAMED - 1 :]:
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
