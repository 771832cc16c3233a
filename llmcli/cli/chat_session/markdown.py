"""Markdown on a terminal while it streams: each block is drawn once, when it is complete.

Nothing is drawn over, so nothing flickers, and the window may change its size at any time.
Each line of a code block is drawn as it ends.
"""

import re
import sys

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.padding import Padding
from rich.style import Style
from rich.syntax import ANSI_LIGHT, ANSISyntaxTheme, Syntax
from rich.theme import Theme

from llmcli.cli.terminal import terminal, visible

FENCE = re.compile(r"\s{0,3}(```+|~~~+)\s*([\w+#.-]*)")
ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])\s")
OUTER_BLANK_LINES = re.compile(r"\A([^\S\n]*\n)+|(\n[^\S\n]*)+\Z")
# Spaces with which rich fills lines: invisible, but copied along.
PADDING = re.compile(r"(?:\x1b\[(?!0m)[\d;]*m +\x1b\[0m| )+$| +(?=\x1b\[0m *$)", re.MULTILINE)
STARTS_BLOCK = re.compile(r"\s{0,3}(#{1,6}\s|>|(\*\s*){3,}$|(-\s*){3,}$|(_\s*){3,}$)")

# The terminal's background is unknown, so set none, and use only those of its colours that its
# theme keeps apart from a light and from a dark one.
ON_ANY_BACKGROUND = {
    "blue": "magenta",
    "bright_blue": "magenta",
    "yellow": "green",
    "bright_red": "red",
    "white": "default",
}
# Rich's own styles for a dark background.
MARKDOWN_THEME = Theme(
    {
        "markdown.code": "bold cyan",
        "markdown.link": "cyan",
        "markdown.link_url": "underline cyan",
        "markdown.kbd": "bold",
    }
)


def _on_any_background(style: Style) -> Style:
    name = style.color.name if style.color else "default"
    return style + Style(color=ON_ANY_BACKGROUND.get(name, name))


CODE_THEME = ANSISyntaxTheme({kind: _on_any_background(style) for kind, style in ANSI_LIGHT.items()})


class _CodeBlock(CodeBlock):
    """A code block that is part of something else, such as a list."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=CODE_THEME, word_wrap=True, padding=1)


class _Markdown(Markdown):
    elements = {**Markdown.elements, "fence": _CodeBlock, "code_block": _CodeBlock}


class MarkdownWriter:
    """Takes Markdown in pieces and draws it on stdout."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, theme=MARKDOWN_THEME)
        self._line = ""
        self._block: list[str] = []
        self._fence: str | None = None
        self._lexer = ""
        self._is_blank = True  # of the line drawn last, so that several blank lines become one

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
                code = Syntax("", self._lexer or "text", theme=CODE_THEME).highlight(line)
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
            self._console.print(Padding(_Markdown(text), (0, 0, 0, indent), expand=False))
        # Lists and headings bring blank lines of their own; here those of the text count.
        lines = OUTER_BLANK_LINES.sub("", PADDING.sub("", drawn.get()))
        terminal.write(f"{lines}\n", is_drawn=True)
        self._block = []
        self._is_blank = False

    @staticmethod
    def _is_table(line: str = "") -> bool:
        return line.lstrip().startswith("|")
