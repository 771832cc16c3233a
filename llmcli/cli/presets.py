"""`llmcli presets`: the named sets of sampling parameters."""

import sys
from typing import Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.options import DebugOption
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.resources import user_presets_folder


def presets(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the presets for --preset, built-in and your own.

    Examples:

    llmcli presets

    llmcli generate "Once upon a time" --preset story
    """
    found = lazy.list_presets()
    if json_:
        terminal.write_json(
            {
                preset.name: {
                    "description": preset.description,
                    "sampling": dict(preset.sampling),
                    "path": str(preset.path),
                }
                for preset in found
            }
        )
        return
    for preset in found:
        values = "  ".join(f"{name} {value}" for name, value in preset.sampling.items())
        lines = (("", preset.description), ("", values), ("", str(preset.path)))
        terminal.write(f"{preset.name}\n{fact_lines(lines, 2, sys.stdout)}")
    terminal.info(f"your own presets go to {user_presets_folder()}")
