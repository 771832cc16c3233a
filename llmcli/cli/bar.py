"""Draws a progress bar on stderr. Needs rich, which is slow to import: `progress.py` asks for it only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from llmcli.cli.terminal import OnProgress, terminal, visible


class _Bytes(progress.DownloadColumn):
    """Nothing while the total is unknown."""

    def render(self, task: progress.Task) -> Text:
        """See DownloadColumn."""
        return Text() if task.total is None else super().render(task)


class _Count(progress.MofNCompleteColumn):
    """As `DownloadColumn`, for counts."""

    def render(self, task: progress.Task) -> Text:
        """See MofNCompleteColumn."""
        return Text() if task.total is None else super().render(task)


class _Note(progress.ProgressColumn):
    """The task's note, or the first note before anything is counted."""

    def render(self, task: progress.Task) -> Text:
        """See ProgressColumn."""
        return Text(terminal.doing or task.fields["note"])


def columns(what: str, unit: str) -> tuple[progress.ProgressColumn, ...]:
    """What a bar shows: its name, what is done, the time left, the note."""
    # On a narrow terminal the bar gets shorter; a figure must not break over two lines.
    whole = Column(no_wrap=True)
    done_column = _Bytes(binary_units=True, table_column=whole) if unit == "bytes" else _Count(table_column=whole)
    name = progress.TextColumn(visible(what), markup=False)
    return (
        name,
        progress.BarColumn(),
        done_column,
        progress.TimeRemainingColumn(table_column=whole),
        _Note(table_column=whole),
    )


@contextmanager
def draw_bar(what: str, unit: str, note: Callable[[], str], first: str) -> Iterator[OnProgress]:
    """A bar with what is done, the time left and the note, which goes away at the end. `first` is the first note."""
    # rich would send what is printed on stdout to stderr, broken into lines of the terminal's width.
    with progress.Progress(
        *columns(what, unit), console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task("", total=None, note=first)
        yield lambda done, total: bar.update(task, completed=done, total=total, note=note())
