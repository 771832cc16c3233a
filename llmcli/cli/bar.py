"""Draws a progress bar on stderr. Needs rich, which is slow to import: `progress.py` asks for it only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from llmcli.cli.terminal import OnProgress, visible


class _Bytes(DownloadColumn):
    """Nothing while nobody knows how much it will be."""

    def render(self, task: Task) -> Text:
        """See DownloadColumn."""
        return Text() if task.total is None else super().render(task)


class _Count(MofNCompleteColumn):
    """The same for things that are counted."""

    def render(self, task: Task) -> Text:
        """See MofNCompleteColumn."""
        return Text() if task.total is None else super().render(task)


@contextmanager
def draw_bar(what: str, unit: str, note: Callable[[], str], first: str) -> Iterator[OnProgress]:
    """A bar with what is done, the time left and the note, which goes away at the end. `first` is the first note."""
    done_column = _Bytes(binary_units=True) if unit == "bytes" else _Count()
    name, note_column = TextColumn(visible(what), markup=False), TextColumn("{task.fields[note]}", markup=False)
    columns = (name, BarColumn(), done_column, TimeRemainingColumn(), note_column)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, note=first)
        yield lambda done, total: bar.update(task, completed=done, total=total, note=note())
