"""Shows how far a long piece of work is, where somebody may be watching."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmcli.cli import lazy
from llmcli.cli.terminal import OnProgress, terminal


@contextmanager
def progress(
    what: str, unit: str = "bytes", note: Callable[[], str] = str, *, first: str = "", beside_lines: bool = False
) -> Iterator[OnProgress]:
    """A bar with what is done and the time left on a terminal, unless quiet was asked for; elsewhere nothing.

    `note` gives a text that stands at the end of the bar; `first` stands there until something is done. With
    `beside_lines` stdout gets results meanwhile. Where that is a terminal they say how far it is, and there is no bar.
    """
    if terminal.is_quiet or not sys.stderr.isatty() or (beside_lines and sys.stdout.isatty()):
        yield lambda done, total: None
        return
    with lazy.draw_bar(what, unit, note, first) as on_progress:
        yield on_progress
