"""Reads JSON Lines as a stream of bounded lines, so that a file of gigabytes takes the memory of one line.

Keeps a digest of everything read. What a line means is `input.py`'s.
"""

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from llmcli.errors import UsageError

MAX_LINE_BYTES = 64 * 1024**2  # far beyond any context; ends what has no line breaks
_BOM = b"\xef\xbb\xbf"


class LineReader:
    """The lines of a file; iterate once. `name` is the file for messages.

    `num_bytes` and `digest` are of what has been read so far.
    """

    def __init__(self, file: BinaryIO, name: str, max_line_bytes: int = MAX_LINE_BYTES):
        self.name = name
        self.num_bytes = 0
        self._file = file
        self._max_line_bytes = max_line_bytes
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of what has been read, in hexadecimal."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Each line's number, from 1, and its bytes without line end and, at the start, byte order mark.

        Raises: UsageError for a line that is too long, or if the file cannot be read.
        """
        number = 0
        while line := self._read_line():
            number += 1
            if len(line) > self._max_line_bytes:
                raise UsageError(
                    f"{self.name} line {number} is longer than {self._max_line_bytes // 1024**2} MiB; "
                    "write one prompt per line"
                )
            self.num_bytes += len(line)
            self._hash.update(line)
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, content.removeprefix(_BOM) if number == 1 else content

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(self._max_line_bytes + 1)
        except OSError as error:
            raise UsageError(f"{self.name} cannot be read: {error.strerror}") from error
