"""Breaks streamed text between words where a terminal would cut a word at its edge.

Nothing that was written is drawn again. A word is written as it comes where it has room in any case, and held until it
ends near the edge. Code is left alone, so that its lines can be copied: the terminal cuts those.
"""

import re
from collections.abc import Callable

from rich.cells import cell_len

# A word that begins with so much room is written at once. A longer one is cut at the edge, so an address stays whole
# for whoever copies it.
LONGEST_WORD = 30
TAB = 8
JOINER = "\u200d"  # makes one emoji of two

_PARTS = re.compile(r"\x1b\[[\d;]*m|\n|[ \t]+|[^ \t\n\x1b]+|\x1b")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_BEGINS_ITEM = re.compile(r"[-*+\d\N{BULLET}]")
_FENCE_CHARACTERS = 80  # as much of a line as can tell whether it is a fence


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
        """The word that is held; what comes next may still be part of it."""
        self._out = []
        if self._word:
            self._write_word()
        return "".join(self._out)

    def flush(self) -> str:
        """All that is held; the text ends here, and another begins on a new line."""
        rest = self.settle() + self._shown_space()
        self._fence = ""
        self._begin_line()
        return rest

    def _begin_line(self) -> None:
        self._line = ""  # its beginning
        self._is_code = bool(self._fence)
        self._column = 0  # cells since the last line break, whoever made it; the terminal itself breaks at its width
        self._space = ""  # behind the last word; it goes if the next one has no room
        self._word = ""  # held
        self._is_written = True  # the beginning of this word
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
        """Add to the word under way, which begins here if there is none."""
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
        """The space that nothing follows: a terminal would take a row more for one beyond its edge."""
        return self._space if self._room() >= 0 else ""

    def _room(self) -> int:
        """Cells behind the space that stands before the word; less than none where that has no room either."""
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
