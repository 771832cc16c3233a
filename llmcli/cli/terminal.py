"""Writes all output: generated text to stdout, all else to stderr, colour and progress only on a terminal.

The gate for text that others wrote (models, files, hubs, the command line): on a terminal its control characters are
shown escaped, since a terminal obeys them, and so are characters that reorder or hide text; a pipe gets the characters
themselves.
"""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from rich.cells import cell_len

from llmcli.errors import OutputError

OnProgress = Callable[[int, int], None]

# A word that begins with this much room is written at once. A longer one is cut at the edge, so an address stays whole
# when copied.
LONGEST_WORD = 30
TAB = 8
JOINER = "\u200d"  # makes one emoji of two

_PARTS = re.compile(r"\x1b\[[\d;]*m|\n|[ \t]+|[^ \t\n\x1b]+|\x1b")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_BEGINS_ITEM = re.compile(r"[-*+\d\N{BULLET}]")
_FENCE_CHARACTERS = 80  # as much of a line as shows whether it is a fence

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # all of Unicode's but newline and tab

# Characters that reorder letters (the bidirectional marks, embeddings, overrides and isolates), and those
# that carry invisible text (tags, annotations, invisible operators). Scripts and emoji need the joiners U+200C and
# U+200D, the space of no width U+200B, the soft hyphen and variation selectors.
_UNSEEN = r"\u061c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_ESCAPED = re.compile(f"[{_CONTROL}{_UNSEEN}]")

# Not escaped by JSON: control characters, and the other two of Unicode's line breaks, at which some tools cut.
_CONTROL_IN_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029]")
COLUMNS_UNKNOWN = 80

LEAST_ROOM = 20  # columns next to the names; with fewer the terminal breaks the lines


class WordWrap:
    """Takes text in pieces and returns what to write now.

    `columns` is asked for the terminal's width each time. Control characters in the text must be escaped, but for
    newlines, tabs and colours.
    """

    def __init__(self, columns: Callable[[], int]):
        self._columns = columns
        self._width = 1
        self._out: list[str] = []
        self._fence = ""
        self._begin_line()

    def push(self, text: str) -> str:
        """Take more text."""
        self._out = []
        self._width = max(self._columns(), 1)
        for part in _PARTS.findall(text):
            if part == "\n":
                self._end_line()
            elif part.startswith("\x1b"):
                self._add(part, 0)
            else:
                self._take(part)
        return "".join(self._out)

    def settle(self) -> str:
        """The word held back; the next piece may continue it."""
        self._out = []
        if self._word:
            self._write_word()
        return "".join(self._out)

    def flush(self) -> str:
        """All that is held back; the text ends here, and another begins on a new line."""
        rest = self.settle() + self._shown_space()
        self._fence = ""
        self._begin_line()
        return rest

    def _begin_line(self) -> None:
        self._line = ""  # the beginning of the line
        self._is_code = bool(self._fence)
        self._column = 0  # cells since the last line break, ours or the terminal's at its width
        self._space = ""  # after the last word; dropped if the next one does not fit
        self._word = ""  # held back
        self._is_written = True  # whether the beginning of this word is written
        self._is_joined = False

    def _end_line(self) -> None:
        self._end_word()
        self._out.append(f"{self._shown_space()}\n")
        marks = _FENCE.match(self._line)
        if not self._fence:
            self._fence = marks[1] if marks else ""
        elif marks and marks[1].startswith(self._fence) and self._line.strip() == marks[1]:
            self._fence = ""
        self._begin_line()

    def _take(self, part: str) -> None:
        is_space = part[0] in " \t"
        indent = self._line
        self._line = (self._line + part)[:_FENCE_CHARACTERS]
        if not is_space and not indent.strip() and len(indent.expandtabs(TAB)) >= 4:
            self._is_code = self._is_code or not _BEGINS_ITEM.match(part)
        if self._is_code:
            self._out.append(part)
        elif not is_space:
            for character in part:
                self._take_character(character)
        elif not indent.strip():
            self._write(part)
        else:
            self._end_word()
            self._space += part

    def _take_character(self, character: str) -> None:
        cells = cell_len(character)
        if self._is_joined or cells == 0:
            self._add(character, cells)
        elif cells == 2:  # Chinese and Japanese break between any two
            self._end_word()
            self._add(character, cells)
            self._end_word()
        else:
            self._add(character, cells)
        self._is_joined = character == JOINER

    def _add(self, piece: str, cells: int) -> None:
        """Add to the current word, which begins here if there is none."""
        if self._is_code or (self._is_written and not self._space):
            self._write(piece)
            return
        room = self._room()
        self._word += piece
        if cells and cell_len(_without_colors(self._word)) > room:
            self._out.append("\n")
            self._space, self._column = "", 0
            self._write_word()
        elif cells and room >= LONGEST_WORD:
            self._write_word()
        else:
            self._is_written = False

    def _end_word(self) -> None:
        if self._word:
            self._write_word()
        self._is_written = False

    def _write_word(self) -> None:
        self._write(self._space + self._word)
        self._space = self._word = ""
        self._is_written = True

    def _write(self, text: str) -> None:
        self._out.append(text)
        self._column = self._column_behind(_without_colors(text))

    def _shown_space(self) -> str:
        """The space at the end of a text: beyond a terminal's edge it would take another row."""
        return self._space if self._room() >= 0 else ""

    def _room(self) -> int:
        """Cells left after the space before the word; negative if that does not fit either."""
        column = self._column_behind(self._space)
        begun = self._column - self._column % self._width
        if self._column and begun == self._column:  # the last row is full
            return -1
        return begun + self._width - column

    def _column_behind(self, text: str) -> int:
        column = self._column
        for number, piece in enumerate(text.split("\t")):
            if number:
                column += TAB - column % TAB
            column += cell_len(piece)
        return column


def _without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


class OutputClosedError(Exception):
    """The reader of stdout or stderr went away, as `head` does; there is nobody to write to."""


class Terminal:
    """The two streams and what may be written to them. One instance, `terminal`, serves the process.

    `is_drawn` says that the control sequences in a text are our own, such as colours: text by others in it must
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
        """One JSON value on one line of stdout, unbroken on a terminal too."""
        line = json_line(value)
        if sys.stdout.isatty():
            line = re.sub(f"[{_UNSEEN}]", lambda match: json.dumps(match[0])[1:-1], line)
        self.write(line)

    def info(self, line: str, *, is_drawn: bool = False) -> None:
        """A line about the run, on stderr; nothing with --quiet."""
        if not self.is_quiet:
            self._emit_line(line, is_drawn)

    def show(self, text: str, *, is_drawn: bool = False, wraps: bool = False) -> None:
        """Text that was requested besides the result, on stderr; also with --quiet."""
        self._emit(sys.stderr, text, is_drawn, wraps)

    def warn(self, line: str) -> None:
        """A warning while the run goes on; also with --quiet."""
        self._emit_line(f"warning: {line}")

    def error(self, line: str) -> None:
        """Why the run ended."""
        self._emit_line(f"error: {line}")

    def show_prompt(self, prompt: str) -> None:
        """Show the prompt before its continuation if both streams are one terminal: a pipe gets only new text."""
        if self.is_quiet or not (sys.stderr.isatty() and sys.stdout.isatty()):
            return
        dim, reset = ("\x1b[2m", "\x1b[0m") if has_color(sys.stderr) else ("", "")
        shown = self._wrap.push(f"{dim}{visible(prompt)}{reset}") + self._wrap.settle()
        _send(sys.stderr, shown)

    def _emit_line(self, line: str, is_drawn: bool = False) -> None:
        """A message: on a terminal it breaks between words. Drop it if stderr cannot be written."""
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
    """Whether a stream is a terminal that colours text, and colour is not switched off."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def give_up(stream: TextIO) -> None:
    """Discard what is buffered and cannot be written; the interpreter's own flush at exit would fail."""
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


def fact_lines(rows: Iterable[tuple[str, str]], width: int, stream: TextIO) -> str:
    """One line for each row, the names padded to `width`; on a terminal long texts continue below their beginning."""
    room = columns_of(stream) - width if stream.isatty() else 0
    return "".join(f"{name:<{width}}{_wrapped(text, width, room)}\n" for name, text in rows)


def _wrapped(text: str, width: int, room: int) -> str:
    if room < LEAST_ROOM or len(text) <= room:
        return text
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':<{width}}".join(parts)


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside: a second one must not lose what the first one saves."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
