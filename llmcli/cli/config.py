"""`llmcli config`: the user's settings, and where each comes from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

from llmcli.cli import main, shared
from llmcli.cli.settings import (
    BUILT_IN,
    configure,
    find_values,
    guess_variable,
    known_variables,
    read_settings,
    running,
    unknown_variables,
)
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.errors import UsageError
from llmcli.resources import config_file


def config(debug: bool = shared.debug_option()) -> None:
    """Show your settings, and where each comes from.

    An option that the command line leaves out comes from a variable LLMCLI_*, else from the file, else it is built-in.
    `llmcli generate --help-all` shows all of a command's.

    Examples:

    llmcli config

    llmcli config > settings.txt
    """
    path, general, problems = config_file(), running.model, []
    known: list[str] = []
    place = "none, as LLMCLI_CONFIG is empty" if path is None else str(path)
    rows = [("file", place if path is None or os.path.lexists(path) else f"{place} (not there)")]
    rows.append(("model", f"{BUILT_IN} (built-in)" if general is None else "{} ({})".format(*general)))
    try:
        rows += [(f"alias {name}", f"{target} ({path})") for name, target in read_settings().aliases.items()]
    except UsageError as error:
        problems.append(str(error))
    for context in _find_contexts(typer.Context(main.whole_program(), info_name="llmcli")):
        try:
            configure(context)
        except UsageError as error:
            problems.append(str(error))
        known += known_variables(context)
        command = context.command_path.removeprefix("llmcli ")
        for param, value, source in find_values(context):
            name = max(param.opts, key=len)
            if name.startswith("--") and (param.show_default != BUILT_IN or running.model != general):
                rows.append((f"{command} {name}", f"{value} ({source})"))
    terminal.write(fact_lines(rows, 32, sys.stdout))
    for problem in dict.fromkeys(problems):
        terminal.warn(f"other commands do not run: {problem}")
    for name in unknown_variables(known):
        meant = guess_variable(name, known, [command.name for command in main.COMMANDS])
        terminal.warn(f"the variable {name} means nothing{f'; did you mean {meant}?' if meant else ''}")


def _find_contexts(context: Any) -> Iterator[Any]:
    """The contexts of all commands below a group."""
    for name, command in context.command.commands.items():
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "commands"):
            yield from _find_contexts(inner)
        else:
            yield inner
