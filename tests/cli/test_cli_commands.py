"""The table of commands says what the commands themselves say."""

import inspect

import pytest
import typer

from llmcli.cli.commands import COMMANDS, Command, load_command


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_summary_is_the_first_sentence_of_the_help(command: Command) -> None:
    loaded = load_command(command)
    text = loaded.info.help if isinstance(loaded, typer.Typer) else inspect.getdoc(loaded)
    assert text is not None
    assert text.startswith(command.summary)
    assert command.summary.endswith(".")


def test_help_lists_every_command(llmcli) -> None:
    text = llmcli("--help").stdout
    for command in COMMANDS:
        assert f" {command.name} " in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_two_examples(llmcli, command: Command) -> None:
    if command.name == "models":  # its own commands have them
        return
    text = llmcli(command.name, "--help").stdout
    assert text.count("llmcli ") >= 3  # the usage line and two examples
