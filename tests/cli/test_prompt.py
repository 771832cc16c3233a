"""Where a prompt comes from: files and pipes are read to their end, up to a limit."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.cli import prompt
from llmcli.errors import UsageError


class Stdin:
    """Standard input with these bytes."""

    def __init__(self, content: bytes):
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


def test_a_pipe_named_as_file_is_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"from a pipe\r\n"))
    writer.start()
    assert prompt.read_prompt(None, path) == "from a pipe"
    writer.join()


def test_a_file_without_end_is_refused(tmp_path):
    link = tmp_path / "zero"
    link.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"{link} is longer than 64 MiB; give a shorter text"):
        prompt.read_prompt(None, link)


def test_the_limit_counts_for_standard_input_too(monkeypatch):
    monkeypatch.setattr(prompt, "MAX_BYTES", 8)
    monkeypatch.setattr(sys, "stdin", Stdin(b"12345678"))
    assert prompt.read_prompt(None, None) == "12345678"
    monkeypatch.setattr(sys, "stdin", Stdin(b"123456789"))
    with pytest.raises(UsageError, match="standard input is longer than 0 MiB"):
        prompt.read_prompt(None, None)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe for standard input: where to write."""
    reader, writer = os.pipe()
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writer


def fill(writer: int, content: bytes) -> None:
    os.write(writer, content)
    os.close(writer)


def test_what_is_piped_in_joins_the_argument(pipe: int) -> None:
    fill(pipe, b"first line\nsecond\n")
    assert prompt.read_prompt("Summarize this:", None) == "Summarize this:\n\nfirst line\nsecond"


def test_what_is_piped_in_joins_a_file(pipe: int, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_text("Summarize this:\n")
    fill(pipe, b"a text")
    assert prompt.read_prompt(None, path) == "Summarize this:\n\na text"


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_pipe_adds_nothing(content: bytes, pipe: int) -> None:
    fill(pipe, content)
    assert prompt.read_prompt("Once", None) == "Once"


def test_a_pipe_alone_is_the_prompt(pipe: int) -> None:
    fill(pipe, b"Once\n")
    assert prompt.read_prompt("-", None) == "Once"


def test_a_redirected_file_joins_and_a_device_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("a text\n")
    for path, expected in ((tmp_path / "text", "Once\n\na text"), (Path("/dev/zero"), "Once")):
        with path.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert prompt.read_prompt("Once", None) == expected


def test_a_pipe_that_says_nothing_is_waited_for_with_a_word(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        fill(pipe, b"late")  # else nothing would ever come

    monkeypatch.setattr(prompt, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(prompt.terminal, "info", say)
    assert prompt.read_prompt("Once", None) == "Once\n\nlate"
    assert [message[:57] for message in said] == ["waiting for standard input, to append it to the prompt; a"]


def test_an_evaluation_takes_no_pipe_beside_its_file(pipe: int, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a text")
    fill(pipe, b"another")
    assert prompt.read_text(path) == "a text"


def test_without_a_text_the_message_names_what_the_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = Stdin(b"typed")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    for stdin in (typed, None):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(UsageError, match="no prompt: give it as an argument"):
            prompt.read_prompt(None, None)
        with pytest.raises(UsageError, match="^no text: give it with --file, or on standard input$"):
            prompt.read_text(None)
    with pytest.raises(UsageError, match="standard input is closed; give the prompt as an argument"):
        prompt.read_prompt("-", None)
    monkeypatch.setattr(sys, "stdin", typed)
    assert prompt.read_prompt("-", None) == "typed"
