"""The table of commands. A command's module is imported when it is called, so `--help` is fast."""

import importlib
from dataclasses import dataclass

import typer

from llmcli.cli.command import add_command


@dataclass(frozen=True)
class CommandEntry:
    """A command: its name, the module of llmcli.cli and the attribute that hold it, and its line in the help.

    The attribute is a function, or a `typer.Typer` with commands of its own. `summary` repeats the first sentence of
    its help, which a test compares.
    """

    name: str
    module: str
    attribute: str
    summary: str


COMMANDS = (
    CommandEntry("tour", "tour", "tour", "Try llmcli in one minute, with the built-in storyteller."),
    CommandEntry("generate", "generate", "generate", "Continue a prompt, or answer one with --chat."),
    CommandEntry("chat", "chat", "chat", "Talk with a model."),
    CommandEntry("batch", "batch", "batch", "Run many prompts from a file and write one line of JSON for each."),
    CommandEntry("serve", "serve", "serve", "Serve a model to other programs over OpenAI's protocol."),
    CommandEntry("replay", "replay", "replay", "Generate the text of a receipt again and show what differs."),
    CommandEntry("quantize", "quantize", "quantize", "Quantize a model to int8 or int4; transformers can load it too."),
    CommandEntry("convert", "quantize", "convert", "Write an AWQ, GPTQ or w8a8 model as compressed-tensors."),
    CommandEntry("eval", "evaluate", "evaluate", "Measure a model's perplexity on a text, or compare two models."),
    CommandEntry("diff", "diff", "diff", "Show where model B differs from model A's text, token by token."),
    CommandEntry("plan", "plan", "plan", "Predict memory and speed of a model without reading its weights."),
    CommandEntry("bench", "bench", "bench", "Measure the speed of a model and compare it with the prediction."),
    CommandEntry(
        "kernels", "kernels", "kernels_app", "See why kernels are fast: studies, side by side, on this machine's card."
    ),
    CommandEntry("verify", "doctor", "verify", "Check that this machine's card computes what it should."),
    CommandEntry("info", "info", "info", "Show a model's shape, memory needs and sampling defaults."),
    CommandEntry("tokenize", "info", "tokenize", "Show the tokens of a text: each id and its piece."),
    CommandEntry("pull", "models", "pull", "Download a model into the hub's cache and print its folder."),
    CommandEntry("models", "models", "models_app", "List or remove downloaded models."),
    CommandEntry("presets", "models", "presets", "List the presets for --preset, built-in and your own."),
    CommandEntry("doctor", "doctor", "doctor", "Check this machine and say how to fix what is wrong."),
)


def add_commands(app: typer.Typer, called: str | None) -> None:
    """Register every command with `app`, the `called` one as it is and the others by name and summary only."""
    for command in COMMANDS:
        if command.name == called:
            _add(app, command)
        else:
            app.command(command.name, help=command.summary)(_not_called)


def load_command(command: CommandEntry) -> object:
    """The command itself."""
    return getattr(importlib.import_module(f"llmcli.cli.{command.module}"), command.attribute)


def _add(app: typer.Typer, command: CommandEntry) -> None:
    loaded = load_command(command)
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=command.name)
    else:
        assert callable(loaded)
        add_command(app, command.name, loaded)


def _not_called() -> None:
    """A command's placeholder in the list."""
