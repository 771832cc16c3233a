"""The reader of lines: numbers, line ends, byte order marks, bounds, and the digest."""

import hashlib
import io
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcli.batch.input import LineReader
from llmcli.errors import UsageError


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary().filter(lambda line: b"\n" not in line)), st.booleans())
def test_lines_are_those_of_split(lines: list[bytes], has_last_break: bool) -> None:
    content = b"\n".join(lines) + b"\n" * has_last_break
    reader = LineReader(io.BytesIO(content), "in")
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    expected = [line.removesuffix(b"\r") for line in expected]
    if expected:
        expected[0] = expected[0].removeprefix(b"\xef\xbb\xbf")
    assert list(reader) == list(enumerate(expected, start=1))
    assert reader.digest == hashlib.sha256(content).hexdigest()
    assert reader.num_bytes == len(content)


def test_a_long_line_is_refused_by_number() -> None:
    content = b"a\n" + b"b" * 10 + b"\n"
    assert len(list(LineReader(io.BytesIO(content), "in", max_line_bytes=11))) == 2
    with pytest.raises(UsageError, match=r"^in line 2 is longer than 0 MiB; write one prompt per line$"):
        list(LineReader(io.BytesIO(content), "in", max_line_bytes=10))


def test_an_endless_line_takes_no_more_memory_than_the_bound() -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            buffer[:] = b"y" * len(buffer)
            return len(buffer)

    tracemalloc.start()
    with pytest.raises(UsageError, match="in line 1 is longer than 1 MiB"):
        list(LineReader(io.BufferedReader(Endless()), "in", max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_a_file_that_fails_is_named() -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(UsageError, match="^in cannot be read: Input/output error$"):
        list(LineReader(io.BufferedReader(Broken()), "in"))
