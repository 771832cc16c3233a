"""Draws a progress bar on stderr. Needs rich, which is slow to import: `progress.py` asks for it only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llmcli.cli.terminal import OnProgress, visible


@contextmanager
def draw_bar(what: str, unit: str, note: Callable[[], str]) -> Iterator[OnProgress]:
    """A bar with what is done, the time left and the note, which goes away at the end."""
    done_column = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    name, note_column = TextColumn(visible(what), markup=False), TextColumn("{task.fields[note]}", markup=False)
    columns = (name, BarColumn(), done_column, TimeRemainingColumn(), note_column)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, note="")
        yield lambda done, total: bar.update(task, completed=done, total=total, note=note())
