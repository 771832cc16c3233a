"""The names of the chats that the user's chat folder keeps, and which file is meant by one.

A name is that of the file without `.json`. One that chat gave begins with the date; those are the ones that may be
removed when there are many.
"""

import re
import time
from pathlib import Path

from llmcli.errors import UsageError

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


def unnamed_paths(folder: Path) -> list[Path]:
    """The chats that nobody has named, in the same order."""
    return [path for path in kept_paths(folder) if is_unnamed(path)]


def is_unnamed(path: Path) -> bool:
    """Whether chat gave the name."""
    return _UNNAMED.match(path.name) is not None


def names_file(name: str) -> bool:
    """Whether a user means a file by it, and not the name of a kept chat."""
    return "/" in name or "\\" in name or name.endswith(SUFFIX)


def find_kept(folder: Path, name: str) -> Path:
    """The kept chat of that name, or of that number in the list.

    Raises: UsageError if there is none.
    """
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
    that is no good as that of a file.
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


def _newest_first(path: Path) -> tuple[int, str]:
    try:
        return -path.stat().st_mtime_ns, path.name
    except FileNotFoundError:  # removed since
        return 0, path.name
