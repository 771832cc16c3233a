"""The table of commands. A command's module is imported when it is called, so that `--help` comes at once."""

import importlib
import os
from dataclasses import dataclass

import typer

from llmcli.cli.optional_value import OptionalValueCommand


@dataclass(frozen=True)
class Command:
    """A command: its name, the module of llmcli.cli and the attribute that hold it, and its line in the help.

    The attribute is a function, or a `typer.Typer` with commands of its own. `summary` repeats the first sentence of
    its help, which a test compares.
    """

    name: str
    module: str
    attribute: str
    summary: str


COMMANDS = (
    Command("tour", "tour", "tour", "Try everything in one minute, with the built-in storyteller."),
    Command("generate", "generate", "generate", "Continue a prompt, token by token."),
    Command("chat", "chat", "chat", "Talk with a model."),
    Command("batch", "batch", "batch", "Run many prompts, one a line, and write one line of JSON for each."),
    Command(
        "quantize",
        "quantize",
        "quantize",
        "Quantize a model's linear layers to int8 or int4, in a form that transformers loads too.",
    ),
    Command(
        "eval",
        "evaluate",
        "evaluate",
        "Measure a model's perplexity on a text with a strided window; with --against, also a second model's.",
    ),
    Command("diff", "diff", "diff", "Follow model A's likeliest text and ask model B about every token of it."),
    Command(
        "plan",
        "plan",
        "plan",
        "Say what memory a model takes and how fast it will be on this machine, before a weight is read.",
    ),
    Command(
        "bench",
        "bench",
        "bench",
        "Measure prompts and decoding at several lengths, beside what `plan` predicts and what the memory allows.",
    ),
    Command(
        "info",
        "info",
        "info",
        "Show a model's shape, its memory needs, its special tokens and its sampling defaults.",
    ),
    Command("tokenize", "tokenize", "tokenize", "Show how the model's tokenizer cuts a text: each id and its piece."),
    Command(
        "pull", "pull", "pull", "Download a model into the hub's cache, or finish a download, and print its folder."
    ),
    Command("models", "models", "models_app", "List or remove downloaded models."),
    Command("presets", "presets", "presets", "List the presets that `--preset NAME` takes, built-in and your own."),
    Command(
        "doctor",
        "doctor",
        "doctor",
        "Check Python, libraries, driver, GPU, compiler and caches; say for each that it is ok, or what mends it.",
    ),
)

_COMPLETION_VARIABLE = "_LLMCLI_COMPLETE"  # set by the shell's completion, which has to know every option


def add_commands(app: typer.Typer, called: str | None) -> None:
    """Register every command with `app`, the `called` one as it is and the others by name and summary only."""
    for command in COMMANDS:
        if command.name == called or _COMPLETION_VARIABLE in os.environ:
            _add(app, command)
        else:
            app.command(command.name, help=command.summary)(_not_called)


def load_command(command: Command) -> object:
    """The command itself."""
    return getattr(importlib.import_module(f"llmcli.cli.{command.module}"), command.attribute)


def _add(app: typer.Typer, command: Command) -> None:
    loaded = load_command(command)
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=command.name)
    else:
        assert callable(loaded)
        app.command(command.name, cls=OptionalValueCommand)(loaded)


def _not_called() -> None:
    """Stands for a command in the list of commands."""
