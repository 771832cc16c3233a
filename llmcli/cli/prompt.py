"""Where a prompt comes from: the argument, a file, or standard input."""

import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

_PATIENCE_SECONDS = 2
MAX_BYTES = 64 * 1024**2  # far beyond any context; ends what would never end, such as `yes | llmcli generate`


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt: the argument or the file, and behind it, after a blank line, what is piped in; or that alone.

    Raises: UsageError if there is none, or an argument and a file; as `read_text`.
    """
    if argument is not None and file is not None:
        raise UsageError("the argument PROMPT and --file cannot be combined")
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError('no prompt: give it as an argument ("Once upon a time"), with --file, or on standard input')
    if argument in (None, "-") and file is None:
        if sys.stdin is None:
            raise UsageError("standard input is closed; give the prompt as an argument or with --file")
        return _read(sys.stdin.buffer, "standard input")
    if argument is None:
        given = read_text(file)
    else:
        refuse_undecoded(argument, "the prompt")
        given = argument
    return "\n\n".join(part for part in (given, _read_piped()) if part)


def read_text(file: Path | None, flag: str = "--file") -> str:
    """The text of a file, else of standard input. One final newline is dropped: editors and echo add it.

    `flag` is the option that names the file.
    A pipe is waited for, as `--file <(git diff)` wants it.
    Raises: UsageError if it cannot be read, is too long, or is not UTF-8 text.
    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                return _read(opened, str(file))
        except OSError as error:
            raise UsageError(f"{flag} {file} cannot be read: {error.strerror}") from error
    if sys.stdin is None or sys.stdin.isatty():  # None: the caller closed it
        raise UsageError(f"no text: give it with {flag}, or on standard input")
    return _read(sys.stdin.buffer, "standard input")


def _read_piped() -> str:
    """What is piped in; nothing from a terminal or a device."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or not the system's
        return ""
    if stat.S_ISFIFO(mode):
        if sys.platform != "win32" and not select.select([descriptor], [], [], _PATIENCE_SECONDS)[0]:
            terminal.info("waiting for standard input, to append it to the prompt; add `< /dev/null` to skip it")
    elif not stat.S_ISREG(mode):
        return ""
    return _read(sys.stdin.buffer, "standard input")


def checked_stop_strings(flags: Sequence[str] | None) -> tuple[str, ...]:
    """The values of --stop.

    Raises: UsageError for one that is empty, or that no text can contain.
    """
    for flag in flags or ():
        if not flag:
            raise UsageError("--stop is empty, expected the text to stop at")
        refuse_undecoded(flag, "--stop")
    return tuple(flags or ())


def refuse_undecoded(argument: str, what: str) -> None:
    """Refuse a command line argument that is not UTF-8: Python carries such bytes as lone surrogates.

    Raises: UsageError.
    """
    if any("\ud800" <= character <= "\udfff" for character in argument):
        raise UsageError(f"{what} is not UTF-8 text")


def _read(file: BinaryIO, where: str) -> str:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{where} is longer than {MAX_BYTES // 1024**2} MiB; give a shorter text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r")
