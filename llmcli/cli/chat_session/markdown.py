"""Markdown on a terminal while it streams: each block is drawn once, when it is complete.

Nothing that was written is ever drawn over, so there is no flicker, and the window may change its size at any time.
Of a code block each line is drawn as it ends.
"""

import re
import sys

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax

from llmcli.cli.terminal import terminal, visible

FENCE = re.compile(r"\s{0,3}(```+|~~~+)\s*([\w+#.-]*)")
ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])\s")
OUTER_BLANK_LINES = re.compile(r"\A([^\S\n]*\n)+|(\n[^\S\n]*)+\Z")
STARTS_BLOCK = re.compile(r"\s{0,3}(#{1,6}\s|>|(\*\s*){3,}$|(-\s*){3,}$|(_\s*){3,}$)")


class MarkdownWriter:
    """Takes Markdown in pieces and draws it on stdout."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._line = ""
        self._block: list[str] = []
        self._fence: str | None = None
        self._lexer = ""
        self._is_blank = True  # what was drawn last, so that several blank lines become one

    def write(self, text: str) -> None:
        """Take more text."""
        self._line += visible(text)
        *lines, self._line = self._line.split("\n")
        for line in lines:
            self._take(line)

    def close(self) -> None:
        """Draw what is left, finished or not."""
        if self._line:
            self._take(self._line)
        self._line = ""
        self._draw_block()

    def _take(self, line: str) -> None:
        fence = FENCE.match(line)
        if self._fence is not None:
            if fence and fence[1].startswith(self._fence) and not fence[2]:
                self._fence = None
            else:
                code = Syntax("", self._lexer or "text", background_color="default").highlight(line)
                code.rstrip()
                self._console.print(code, soft_wrap=True)
            self._is_blank = False
        elif fence:
            self._draw_block()
            self._fence, self._lexer = fence[1], fence[2]
        elif not line.strip():
            self._draw_block()
            if not self._is_blank:
                self._console.print()
            self._is_blank = True
        else:
            if ITEM.match(line) or STARTS_BLOCK.match(line) or self._is_table(line) != self._is_table(*self._block[:1]):
                self._draw_block()
            self._block.append(line)

    def _draw_block(self) -> None:
        if not self._block:
            return
        item = ITEM.match(self._block[0])
        indent = len(item[1].expandtabs(4)) if item else 0
        text = "\n".join(line[len(item[1]) :] if item else line for line in self._block)
        with self._console.capture() as drawn:
            self._console.print(Padding(Markdown(text), (0, 0, 0, indent), expand=False))
        # Lists and headings bring blank lines of their own; here those of the text count.
        terminal.write(f"{OUTER_BLANK_LINES.sub('', drawn.get())}\n", is_drawn=True)
        self._block = []
        self._is_blank = False

    @staticmethod
    def _is_table(line: str = "") -> bool:
        return line.lstrip().startswith("|")
