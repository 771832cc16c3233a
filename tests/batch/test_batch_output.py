"""The file of results: what is found in it, and that it grows by whole lines only."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli.batch.output import InOrder, Journal, Written, holds_something, read_output
from llmcli.errors import OutputError, UsageError

KNOWN: dict[Any, int] = {"a": 1, "b": 2, 3: 3}


def line(line_id: object, **values: object) -> str:
    return json.dumps({"id": line_id, "text": "ü", **values}, ensure_ascii=False) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_bytes("".join(lines).encode())
    return path


def test_places_are_those_of_the_lines(tmp_path: Path) -> None:
    lines = [line(3), line("b", error={"message": "x"}), line("a", error=None)]
    path = write(tmp_path / "out", *lines)
    written = read_output(path, KNOWN)
    content = path.read_bytes()
    assert [content[begin : begin + size].decode() for begin, size in written.places.values()] == lines
    assert list(written.places) == [3, "b", "a"]
    assert (written.failed, written.done, written.torn) == ({"b"}, {3, "a"}, 0)


def test_openai_results_have_their_custom_id(tmp_path: Path) -> None:
    path = write(tmp_path / "out", line("batch_req_1", custom_id="a", error=None))
    assert read_output(path, KNOWN).done == {"a"}


@pytest.mark.parametrize(
    "torn", ['{"id": 3', "\0\0\0", "{}", line(3)[:-1], "nonsense\n", "[]\n", "\n", '{"id": true}\n']
)
def test_a_torn_last_line_is_found_and_cut_off(tmp_path: Path, torn: str) -> None:
    path = write(tmp_path / "out", line("a"), torn)
    written = read_output(path, KNOWN)
    assert (written.done, written.torn) == ({"a"}, len(torn.encode()))
    journal = Journal(path, written)
    assert path.read_text() == line("a")
    journal.append(3, line(3))
    journal.close()
    assert path.read_text() == line("a") + line(3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((line("x"), line("a")), "out line 1 has the id 'x', which is not in the input"),
        ((line("a"), line(3), line("a")), "out line 3 has the id 'a' a second time"),
        ((line("a"), "nonsense\n", line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), "\n", line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), '{"text": "b"}\n', line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), line("3"), line("b")), "out line 2 has the id '3', which is not in the input"),
    ],
)
def test_what_no_run_has_written_is_refused_with_its_place(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path / "out", *lines)
    content = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        read_output(path, KNOWN)
    assert path.read_bytes() == content


def test_short_writes_become_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, content: real(file, content[:3]))
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    journal.close()
    assert (tmp_path / "out").read_text() == line("a")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real = os.write
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    calls: list[int] = []

    def fail_half_way(file: int, content: memoryview) -> int:
        calls.append(len(content))
        if len(calls) == 2:
            raise error
        return real(file, content[:5])

    monkeypatch.setattr(os, "write", fail_half_way)
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        journal.append("b", line("b"))
    monkeypatch.undo()
    assert (tmp_path / "out").read_text() == line("a")
    journal.append("b", line("b"))
    journal.close()
    assert (tmp_path / "out").read_text() == line("a") + line("b")


def test_sorting_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path, Written())
    for line_id in (3, "b", "a"):
        journal.append(line_id, line(line_id))
    journal.sort(["a", "b", 3, "not there"])
    assert path.read_text() == line("a") + line("b") + line(3)
    journal.append("not there", line("later"))
    journal.close()
    assert path.read_text() == line("a") + line("b") + line(3) + line("later")
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_in_order_is_not_written_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    inode = (tmp_path / "out").stat().st_ino
    journal.sort(["a", "b"])
    journal.close()
    assert (tmp_path / "out").stat().st_ino == inode


def test_what_an_output_may_be(tmp_path: Path) -> None:
    assert not holds_something(tmp_path / "new")
    assert not holds_something(write(tmp_path / "empty"))
    assert holds_something(write(tmp_path / "full", "x"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="is not a regular file; name one, or `-` for standard output"):
            holds_something(path)
    with pytest.raises(UsageError, match="missing is not a folder"):
        holds_something(tmp_path / "missing" / "out")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        holds_something(tmp_path / "full" / "out")


@given(st.permutations(range(8)), st.integers(0, 8))
def test_order_is_kept_whatever_comes_first(order: list[int], num_ended: int) -> None:
    written: list[object] = []
    in_order = InOrder(iter(range(8)), lambda line_id, _: written.append(line_id))
    for count, number in enumerate(order[:num_ended], start=1):
        in_order.put(number, "")
        ended = order[:count]
        assert written == list(range(next(n for n in range(9) if n not in ended)))
    in_order.flush()
    assert written == sorted(order[:num_ended])
