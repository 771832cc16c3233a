"""The output: a file of JSON Lines that grows by whole lines, and what it holds when a run resumes.

Each line is one write. A kill leaves whole lines and at most one torn line, which is found and cut off. When a run
resumes, failed results are removed and tried again.
"""

import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from llmcli.batch.input import LineId, LineReader
from llmcli.differences import shown
from llmcli.errors import OutputError, UsageError
from llmcli.reading import parse_json
from llmcli.writing import whole_file

# `DiskDict`: a dict by ids of lines in a temporary file, so that a file of many lines takes no memory.
#
# SQLite keeps a few megabytes of it in memory. The file has no name, and goes with the process.

Value = TypeVar("Value")  # what JSON holds; a tuple becomes a list


class DiskDict(MutableMapping[LineId, Value], Generic[Value]):
    """See above. Iterates in the order of insertion. Raises: OutputError for a full disk"""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._run("PRAGMA journal_mode=OFF")  # nobody reads it after a kill
        self._run("CREATE TABLE items (place INTEGER PRIMARY KEY, key TEXT UNIQUE, value TEXT)")

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise OutputError(f"the temporary file of the lines' ids cannot be written: {error}") from error

    def __getitem__(self, key: LineId) -> Value:
        row = self._run("SELECT value FROM items WHERE key = ?", _text(key)).fetchone()
        if row is None:
            raise KeyError(key)
        return json.loads(row[0])  # type: ignore[no-any-return]

    def __setitem__(self, key: LineId, value: Value) -> None:
        text = json.dumps(value)
        statement = (
            "INSERT INTO items (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        self._run(statement, _text(key), text)

    def __delitem__(self, key: LineId) -> None:
        if self._run("DELETE FROM items WHERE key = ?", _text(key)).rowcount == 0:
            raise KeyError(key)

    def __iter__(self) -> Iterator[LineId]:
        for (key,) in self._run("SELECT key FROM items ORDER BY place"):
            yield json.loads(key)

    def __len__(self) -> int:
        count: int = self._run("SELECT COUNT(*) FROM items").fetchone()[0]
        return count


def _text(key: Any) -> str:
    """Equal keys have one text: 1 and 1.0 are equal, 1 and "1" are not."""
    return json.dumps(int(key) if isinstance(key, float) and key.is_integer() else key)


_SECONDS_BETWEEN_SYNCS = 1.0
_COPIED_BYTES = 2**20
_REMEDY = "name another output"


@dataclass
class Written:
    """What an output holds: the place of each result, the failed ones, and the bytes of a torn last line.

    `cut` has the reason of each result that was cut. OpenAI's form does not say whether a text is complete: there
    `cut` has every result of the greatest length.
    Units: (offset, length) and `torn` in bytes
    """

    places: MutableMapping[LineId, tuple[int, int]] = field(default_factory=DiskDict)
    failed: set[LineId] = field(default_factory=set)
    cut: MutableMapping[LineId, str] = field(default_factory=DiskDict)
    end: int = 0
    torn: int = 0

    @property
    def done(self) -> "Done":
        """The ids of results that stay."""
        return Done(self)


@dataclass(frozen=True, eq=False)
class Done(Set[LineId]):
    """See `Written.done`."""

    written: Written

    def __contains__(self, line_id: object) -> bool:
        return line_id in self.written.places and line_id not in self.written.failed

    def __iter__(self) -> Iterator[LineId]:
        return (line_id for line_id in self.written.places if line_id not in self.written.failed)

    def __len__(self) -> int:
        return len(self.written.places) - len(self.written.failed)


def holds_something(path: Path) -> bool:
    """Whether an output exists and is not empty.

    Raises: UsageError if it is not a regular file or cannot be examined.
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: {path.parent} is not a folder") from None
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{str(path)!r} cannot be written: {reason}; {_REMEDY}") from error
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(f"{path} is not a regular file; name one, or `-` for standard output")
    return info.st_size > 0


def read_output(path: Path, known: Mapping[LineId, int]) -> Written:
    """Read an output; `known` are the ids of the input, each with its line.

    Raises: UsageError for a line that no run of this input has written, with its place.
    """
    written = Written()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for number, content in LineReader(file, str(path)):
                end = file.tell()
                file.seek(end - 1)
                is_whole = file.read(1) == b"\n"
                found = read_result(content) if is_whole else None
                if found is None:
                    if end < size:
                        raise UsageError(f"{path} line {number} is not a result of llmcli batch; {_REMEDY}")
                    break
                line_id, has_failed, cut = found
                if line_id not in known:
                    raise UsageError(
                        f"{path} line {number} has the id {shown(line_id)}, which is not in the input; {_REMEDY}"
                    )
                if line_id in written.places:
                    raise UsageError(f"{path} line {number} has the id {shown(line_id)} a second time; {_REMEDY}")
                written.places[line_id] = (written.end, end - written.end)
                if has_failed:
                    written.failed.add(line_id)
                elif cut is not None:
                    written.cut[line_id] = cut
                written.end = end
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    written.torn = size - written.end
    return written


class Result(NamedTuple):
    """A line of an output; `cut` is the reason if its text was cut."""

    id: LineId
    has_failed: bool
    cut: str | None


def read_result(content: bytes) -> Result | None:
    """A line of an output; None for anything else."""
    try:
        value = parse_json(content)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    line_id = value.get("custom_id", value.get("id"))
    if not isinstance(line_id, str | int | float) or isinstance(line_id, bool):
        return None
    return Result(line_id, value.get("error") is not None, _cut(value))


def _cut(value: dict[str, Any]) -> str | None:
    if "custom_id" not in value:
        return str(value.get("finish_reason")) if value.get("is_complete") is False else None
    try:
        reason = value["response"]["body"]["choices"][0]["finish_reason"]
    except (KeyError, IndexError, TypeError):  # a failed result
        return None
    return "length" if reason == "length" else None


class Journal:
    """An output file open for more lines. `written` is what `read_output` found in it.

    Cuts off a torn line, and removes failed results. Raises: OutputError, from every method.
    """

    def __init__(self, path: Path, written: Written):
        self._path = path
        self._places = written.places
        with as_output_error(path):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            self._end = written.end
            if written.torn:
                os.ftruncate(self._file, self._end)
            if written.failed:
                self._rewrite(written.done)
        self._sync_time = time.monotonic()

    def append(self, line_id: LineId, line: str) -> None:
        """Add a line, which ends in a line break. If that fails or is interrupted, the file is as before."""
        content = line.encode(errors="replace")
        with as_output_error(self._path):
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except BaseException:
                os.ftruncate(self._file, self._end)
                raise
            self._places[line_id] = (self._end, len(content))
            self._end += len(content)
            if time.monotonic() - self._sync_time >= _SECONDS_BETWEEN_SYNCS:
                os.fsync(self._file)
                self._sync_time = time.monotonic()

    def sort(self, ids: Collection[LineId]) -> None:
        """Sort the lines in the order of `ids`, unless they are already."""
        latest = -1
        for line_id in ids:
            offset, _ = self._places.get(line_id, (latest, 0))
            if offset < latest:
                break
            latest = offset
        else:
            return
        with as_output_error(self._path):
            self._rewrite(line_id for line_id in ids if line_id in self._places)

    def close(self) -> None:
        """Write everything to the disk."""
        with as_output_error(self._path):
            os.fsync(self._file)
            os.close(self._file)

    def _rewrite(self, ids: Iterable[LineId]) -> None:
        """Replace the file by one with these lines."""
        places: MutableMapping[LineId, tuple[int, int]] = DiskDict()
        with whole_file(self._path) as target, self._path.open("rb") as source:
            os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(self._file).st_mode))
            for line_id in ids:
                offset, length = self._places[line_id]
                source.seek(offset)
                places[line_id] = (target.tell(), length)
                while length:
                    length -= target.write(source.read(min(length, _COPIED_BYTES)))
            end = target.tell()
        os.close(self._file)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self._places, self._end = places, end


class InOrder:
    """Passes lines on in the order of `ids`; holds back those that come early."""

    def __init__(self, ids: Iterator[LineId], write: Callable[[LineId, str], None]):
        self._ids = ids
        self._write = write
        self._early: dict[LineId, str] = {}
        self._next = next(ids, None)

    def put(self, line_id: LineId, line: str) -> None:
        """Take a line; if its turn has come, write it and those that waited for it."""
        self._early[line_id] = line
        while self._next is not None and self._next in self._early:
            self._write(self._next, self._early.pop(self._next))
            self._next = next(self._ids, None)

    def flush(self) -> None:
        """Write what is held back, though earlier lines are missing: the run ends here."""
        while self._early and self._next is not None:
            if self._next in self._early:
                self._write(self._next, self._early.pop(self._next))
            self._next = next(self._ids, None)


@contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Raises: OutputError for an OSError"""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
