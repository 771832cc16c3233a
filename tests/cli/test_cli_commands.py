"""The table of commands agrees with the commands."""

import ast
import inspect
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer

from llmcli import cli
from llmcli.cli.commands import COMMANDS, CommandEntry, load_command

MAX_PARAMETERS = 8
MAX_LINES = 60


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_summary_is_the_first_sentence_of_the_help(command: CommandEntry) -> None:
    loaded = load_command(command)
    text = loaded.info.help if isinstance(loaded, typer.Typer) else inspect.getdoc(loaded)
    assert text is not None
    assert text.startswith(command.summary)
    assert command.summary.endswith(".")


@pytest.mark.parametrize("path", sorted(Path(cli.__path__[0]).glob("*.py")), ids=lambda path: path.stem)
def test_no_command_takes_or_does_too_much(path: Path) -> None:
    """Options are in groups, and a command's work is split into named steps."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            num_parameters = len(node.args.args) + len(node.args.kwonlyargs)
            assert num_parameters <= MAX_PARAMETERS, f"{node.name} takes {num_parameters}"
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            assert num_lines <= MAX_LINES, f"{node.name} has {num_lines} lines"


def test_help_lists_every_command(llmcli) -> None:
    text = llmcli("--help").stdout
    for command in COMMANDS:
        assert f" {command.name} " in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_two_examples(llmcli, command: CommandEntry) -> None:
    if command.name in ("models", "kernels"):  # their subcommands have them
        return
    text = llmcli(command.name, "--help").stdout
    assert text.count("llmcli ") >= 3  # the usage line and two examples


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_file_without_permission_is_refused_by_who_opens_it(command: CommandEntry) -> None:
    """Typer itself checks whether a path may be read, and refuses with its own message."""
    loaded = load_command(command)
    functions = (
        [entry.callback for entry in loaded.registered_commands] if isinstance(loaded, typer.Typer) else [loaded]
    )
    for function in functions:
        assert callable(function)
        for name, hint in get_type_hints(function, include_extras=True).items():
            kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (None,)
            if kind in (Path, Path | None):
                assert not metadata[0].readable, name
