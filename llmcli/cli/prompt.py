"""Where a prompt comes from: the argument, a file, or standard input."""

import sys
from pathlib import Path

from llmcli.errors import UsageError


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt. Of a file or standard input one final newline is dropped: editors and echo add it.

    Raises: UsageError if there is none or more than one, if the file cannot be read, or if it is not UTF-8 text.
    """
    if argument is not None and file is not None:
        raise UsageError("a prompt and --file are both given; give one of them")
    if file is not None:
        try:
            return _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"--file {file} cannot be read: {error.strerror}") from error
    if argument is None and sys.stdin.isatty():
        raise UsageError('no prompt: give it as an argument ("Once upon a time"), with --file, or on standard input')
    if argument in (None, "-"):
        return _decode(sys.stdin.buffer.read(), "standard input")
    assert argument is not None
    if any("\ud800" <= character <= "\udfff" for character in argument):  # bytes that the shell passed undecoded
        raise UsageError("the prompt is not UTF-8 text")
    return argument


def _decode(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r")
