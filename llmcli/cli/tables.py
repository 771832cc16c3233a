"""Tables of figures: drawn by rich on a terminal, plain columns elsewhere."""

import io
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcli.cli.terminal import has_color, visible


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for stdout, its columns flush right; on a terminal it is drawn, see `Terminal`."""
    if sys.stdout.isatty():
        table = Table(*header, box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in table.columns:
            column.justify = "right"
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, no_color=not has_color(sys.stdout))
        console.print(table)
        return text.getvalue().lstrip("\n")
    lines = [header, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )
