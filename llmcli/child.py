"""What a child process runs first: this very llmcli, from the folder that its parent runs, whatever else is installed.

The folder itself stays out of the child's search path: in a source tree it also holds `tests` and `scripts`.
"""

from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parents[1])


def child_program(module: str, call: str = "main()", *, before: str = "") -> str:
    """A program for `python -c` that runs `call` of `module`. `before` are statements that run ahead of the import."""
    return (
        f"import sys; sys.path.insert(0, {_FOLDER!r}); import llmcli; del sys.path[0]; "
        f"{before}from {module} import main; {call}"
    )
