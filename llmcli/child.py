"""The start of a child process: this very llmcli, from its parent's folder, whatever else is installed.

The folder itself is not in the child's search path: in a source tree it also holds `tests` and `scripts`.
"""

from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parents[1])


def child_program(module: str, call: str = "main()", *, before: str = "") -> str:
    """A program for `python -c` that runs `call` of `module`. The statements `before` run before the import."""
    return (
        f"import sys; sys.path.insert(0, {_FOLDER!r}); import llmcli; del sys.path[0]; "
        f"{before}from {module} import main; {call}"
    )
