"""`llmcli doctor`: is this machine ready?"""

import dataclasses
import sys
from typing import Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.options import DebugOption
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.errors import DeviceError


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
    debug: DebugOption = False,
) -> None:
    """Check this machine and say how to fix what is wrong.

    It looks at Python, libraries, driver, GPU, compiler and caches. The exit code is 4 if something is broken. A
    machine without a GPU is not broken.

    Examples:

    llmcli doctor

    llmcli doctor --json
    """
    checks = lazy.examine()
    if json_:
        terminal.write_json([dataclasses.asdict(check) for check in checks])
    else:
        marks = {"ok": "ok", "absent": "--", "problem": "!!"}
        for check in checks:
            lines = [(f"{marks[check.state]}  {check.name}", check.detail)]
            if check.fix:
                lines.append(("", f"fix: {check.fix}"))
            terminal.write(fact_lines(lines, 19, sys.stdout))
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(DeviceError.exit_code)
