"""Everything that is written: generated text to stdout, all else to stderr, colour and progress only on a terminal.

The gate for text that others wrote (models, files, hubs, the command line): on a terminal its control characters are
shown escaped, since a terminal obeys them, and so are characters that reorder or hide text; a pipe gets the characters
themselves.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from typing import TextIO

from llmcli.cli.word_wrap import WordWrap
from llmcli.errors import OutputError

OnProgress = Callable[[int, int], None]

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # all of Unicode's but newline and tab
# What orders letters otherwise than they stand (the bidirectional marks, embeddings, overrides and isolates), and what
# carries text that nobody sees (tags, annotations, invisible operators). Scripts and emoji need the joiners U+200C and
# U+200D, the space of no width U+200B, the soft hyphen and variation selectors.
_UNSEEN = r"\u061c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_ESCAPED = re.compile(f"[{_CONTROL}{_UNSEEN}]")
# What JSON does not escape: control characters, and the other two of Unicode's line breaks, at which some tools cut.
_CONTROL_IN_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029]")
COLUMNS_UNKNOWN = 80


class OutputClosedError(Exception):
    """The reader of stdout or stderr went away, as `head` does; nothing is left to say to anyone."""


class Terminal:
    """The two streams and what may be said on them. One instance, `terminal`, serves the process.

    `is_drawn` says that the control sequences in a text are our own, such as colours: what others wrote in it must
    have gone through `visible`. `wraps` says that a text comes in pieces: on a terminal its lines break between words,
    which may hold a word back until the next call of any method. `doing` is what a progress bar shows before it
    has work to count.
    """

    def __init__(self) -> None:
        self.is_quiet = False
        self.is_debug = bool(os.environ.get("LLMCLI_DEBUG"))
        self.doing = ""
        self._wrap = WordWrap(lambda: columns_of(sys.stdout if sys.stdout.isatty() else sys.stderr))

    def write(self, text: str, *, is_drawn: bool = False, wraps: bool = False) -> None:
        """Generated text."""
        self._emit(sys.stdout, text, is_drawn, wraps)

    def write_json(self, value: object) -> None:
        """One JSON value on one line of stdout, which is one on a terminal too."""
        line = json_line(value)
        if sys.stdout.isatty():
            line = re.sub(f"[{_UNSEEN}]", lambda match: json.dumps(match[0])[1:-1], line)
        self.write(line)

    def info(self, line: str, *, is_drawn: bool = False) -> None:
        """A line about the run, on stderr; nothing with --quiet."""
        if not self.is_quiet:
            self._emit_line(line, is_drawn)

    def show(self, text: str, *, is_drawn: bool = False, wraps: bool = False) -> None:
        """Text that was asked for beside the result, on stderr; also with --quiet."""
        self._emit(sys.stderr, text, is_drawn, wraps)

    def warn(self, line: str) -> None:
        """Something the user should know though the run goes on; also with --quiet."""
        self._emit_line(f"warning: {line}")

    def error(self, line: str) -> None:
        """Why the run ended."""
        self._emit_line(f"error: {line}")

    def show_prompt(self, prompt: str) -> None:
        """Show the prompt before its continuation, if both streams are one terminal: a pipe gets only what is new."""
        if self.is_quiet or not (sys.stderr.isatty() and sys.stdout.isatty()):
            return
        dim, reset = ("\x1b[2m", "\x1b[0m") if has_color(sys.stderr) else ("", "")
        shown = self._wrap.push(f"{dim}{visible(prompt)}{reset}") + self._wrap.settle()
        _send(sys.stderr, shown)

    def _emit_line(self, line: str, is_drawn: bool = False) -> None:
        """A message: on a terminal it breaks between words. Drop it where stderr cannot take it."""
        if sys.stderr.isatty():
            wrap = WordWrap(lambda: columns_of(sys.stderr))
            line = wrap.push(line if is_drawn else visible(line)) + wrap.flush()
            is_drawn = True
        with contextlib.suppress(OutputError):
            self._emit(sys.stderr, f"{line}\n", is_drawn)

    def _emit(self, stream: TextIO, text: str, is_drawn: bool = False, wraps: bool = False) -> None:
        if stream.isatty():
            text = text if is_drawn else visible(text)
            text = self._wrap.push(text) if wraps else self._wrap.flush() + text
        _send(stream, text)


def json_line(value: object) -> str:
    """A JSON value on one line, which ends in a line break."""
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROL_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def visible(text: str) -> str:
    """The text with escapes such as `\\x1b` and `\\u202e`: for control characters, but newline and tab, and for those
    that reorder or hide text."""
    return _ESCAPED.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def has_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that colours text, and nobody has asked for none."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def give_up(stream: TextIO) -> None:
    """Send nowhere what is still buffered and cannot be written; the interpreter's own flush at exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def columns_of(stream: TextIO) -> int:
    """The width of a terminal, in columns."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS_UNKNOWN
    except OSError:
        return COLUMNS_UNKNOWN


def _send(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        give_up(stream)
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError from error
        raise OutputError(f"{stream.name} cannot be written: {error.strerror}") from error


terminal = Terminal()
