"""Shows the progress of long work where somebody may be watching, and why the first start takes longer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmcli.cli import lazy
from llmcli.cli.terminal import OnProgress, terminal
from llmcli.cli.units import counted
from llmcli.resources import folder_problem, kernel_cache_folder


@contextmanager
def progress(
    what: str, unit: str = "bytes", note: Callable[[], str] = str, *, first: str = "", beside_lines: bool = False
) -> Iterator[OnProgress]:
    """A bar with what is done and the time left on a terminal, except with --quiet; elsewhere nothing.

    `note` gives the text at the end of the bar; `first` is shown until something is done. With
    `beside_lines` stdout gets results meanwhile; on a terminal they show the progress, and there is no bar.
    """
    if terminal.is_quiet or not sys.stderr.isatty() or (beside_lines and sys.stdout.isatty()):
        yield lambda done, total: None
        return
    with lazy.bar.draw_bar(what, unit, note, first) as on_progress:
        yield on_progress


def say_compiling(done: int, total: int) -> None:
    """Say that kernels are compiled first; later starts find them in the cache."""
    if done == 0:
        kernels, them = counted(total, "kernel"), "it" if total == 1 else "them"
        problem = folder_problem(kernel_cache_folder())
        if problem is None:
            terminal.info(f"compiling {kernels}; the next start finds {them} compiled")
        else:
            terminal.info(f"compiling {kernels} at each start: {problem}")
    terminal.doing = f"compiling kernels {done}/{total}" if done < total else ""
