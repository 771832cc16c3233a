"""Tables of figures: drawn by rich on a terminal, plain columns elsewhere; and as CSV."""

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcli.cli.terminal import columns_of, has_color, visible

GAP = 2  # columns of the terminal between two columns of the table


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for stdout, its columns flush right; drawn on a terminal, see `Terminal`.

    Columns that do not fit on a terminal follow in another table below, after a repeat of the first column.
    """
    if sys.stdout.isatty():
        columns = [[visible(cell) for cell in column] for column in zip(header, *rows, strict=True)]
        room = columns_of(sys.stdout)
        return "\n".join(_drawn([columns[0], *block], room) for block in _blocks(columns, room))
    return "".join(f"{line}\n" for line in aligned_lines([header, *rows], ">" * len(header)))


def aligned_lines(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows in plain columns, each flush left or right: `sides` has a `<` or a `>` for each."""
    widths = [_longest(column) for column in zip(*rows, strict=True)]
    return ["  ".join(map(padded, row, widths, sides)).rstrip() for row in rows]


def padded(cell: str, width: int, side: str) -> str:
    """A cell flush left for `<`, or right for `>`."""
    space = " " * (width - cell_len(cell))
    return cell + space if side == "<" else space + cell


def csv_text(header: Sequence[str], records: Iterable[Mapping[str, object]]) -> str:
    """A line for each record, under a header, which names what is written; what is None or missing is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, header, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _blocks(columns: Sequence[Sequence[str]], room: int) -> Iterator[list[Sequence[str]]]:
    """The columns after the first, as many at a time as fit."""
    block: list[Sequence[str]] = []
    for column in columns[1:]:
        if block and _width(_least(one) for one in (columns[0], *block, column)) > room:
            yield block
            block = []
        block.append(column)
    yield block


def _drawn(columns: Sequence[Sequence[str]], room: int) -> str:
    widths = [_longest(column) for column in columns]
    for index, column in enumerate(columns):  # break words into lines only if the table then fits
        excess = max(_width(widths) - room, 0)
        widths[index] = max(widths[index] - excess, _least(column))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column[0]), width=width, justify="right")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=room, force_terminal=True, no_color=not has_color(sys.stdout)).print(table)
    return text.getvalue().lstrip("\n")


def _width(widths: Iterable[int]) -> int:
    each = list(widths)
    return sum(each) + GAP * (len(each) - 1)


def _longest(texts: Sequence[str]) -> int:
    return max(cell_len(text) for text in texts)


def _least(column: Sequence[str]) -> int:
    """The least width of a column: words may break into lines, figures keep their units."""
    has_figures = any(character.isdigit() for text in column for character in text)
    return _longest(column) if has_figures else _longest([word for text in column for word in text.split()] or [""])
