"""Where a prompt comes from: files and pipes are read to their end, but not without end."""

import io
import os
import sys
import threading

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
