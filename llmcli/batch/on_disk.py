"""`DiskDict`: a dict by ids of lines in a temporary file, so that a file of many lines takes no memory.

SQLite keeps a few megabytes of it in memory. The file has no name, and goes with the process.
"""

import json
import sqlite3
from collections.abc import Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from llmcli.batch.input import LineId
from llmcli.errors import OutputError

Value = TypeVar("Value")  # what JSON holds; a tuple becomes a list


class DiskDict(MutableMapping[LineId, Value], Generic[Value]):
    """See the module. Iterates in the order of insertion. Raises: OutputError for a full disk"""

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
