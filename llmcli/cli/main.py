"""The program `llmcli`: the table of its commands, and where errors become a line and an exit code.

A command's module is imported when it is called, so `--help` is fast.

Exit codes: 0 done; 1 our bug, or lines of a batch that failed; 2 usage; 3 checkpoint, config or tokenizer; 4 device or
memory; 5 output that cannot be written; 6 a replay whose text differs; 7 a text that is unfinished, with
--require-complete; 130 interrupted by Ctrl-C; 141 the reader of stdout went away.
"""

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import typer

from llmcli import __version__
from llmcli.cli.command import HELP_NAMES, Group, add_command, usage_message
from llmcli.cli.terminal import OutputClosedError, give_up, terminal
from llmcli.errors import EXIT_INTERRUPTED, LLMCliError, OutputError, UsageError, is_memory_error, out_of_memory

EXIT_BUG = 1
EXIT_CLOSED_PIPE = 141
# numpy's BLAS reads it when it is loaded. Several threads wait for each other by spinning: next to other programs
# a short prompt then takes twenty times the processor's time.
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
MAX_HELP_WIDTH = 120
# How the shell asks what could come next, and what is typed so far: by bash, and by zsh, fish and PowerShell.
_COMPLETION_VARIABLE = "_LLMCLI_COMPLETE"
_TYPED_VARIABLES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)  # a full disk, and a closed stdout


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
    CommandEntry(
        "convert",
        "quantize",
        "convert",
        "Write a GGUF file, or an AWQ, GPTQ or w8a8 model, as a folder of compressed-tensors.",
    ),
    CommandEntry("eval", "evaluate", "evaluate", "Measure a model's perplexity on a text, or compare two models."),
    CommandEntry("diff", "evaluate", "diff", "Show where model B differs from model A's text, token by token."),
    CommandEntry("plan", "plan", "plan", "Predict memory and speed of a model without reading its weights."),
    CommandEntry("bench", "bench", "bench", "Measure the speed of a model and compare it with the prediction."),
    CommandEntry(
        "kernels", "kernels", "kernels_app", "See why kernels are fast: studies, side by side, on this machine's card."
    ),
    CommandEntry("verify", "doctor", "verify", "Check that this machine's card computes what it should."),
    CommandEntry("info", "models", "info", "Show a model's shape, memory needs and sampling defaults."),
    CommandEntry("tokenize", "models", "tokenize", "Show the tokens of a text: each id and its piece."),
    CommandEntry("pull", "models", "pull", "Download a model into the hub's cache and print its folder."),
    CommandEntry("models", "models", "models_app", "List or remove downloaded models, and give them aliases."),
    CommandEntry("presets", "models", "presets", "List the presets for --preset, built-in and your own."),
    CommandEntry("config", "config", "config", "Show your settings, and where each comes from."),
    CommandEntry("doctor", "doctor", "doctor", "Check this machine and say how to fix what is wrong."),
)


def add_commands(app: typer.Typer, called: str | None) -> None:
    """Register every command with `app`, the `called` one as it is and the others by name and summary only."""
    for command in COMMANDS:
        if command.name == called:
            _add(app, command)
        else:
            app.command(command.name, help=command.summary)(_not_called)


def whole_program() -> Any:
    """The program with every command itself, as Typer's group."""
    app = typer.Typer(cls=Group)
    for command in COMMANDS:
        _add(app, command)
    return typer.main.get_command(app)


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


def _print_version(value: bool) -> None:
    if value:
        terminal.write(f"llmcli {__version__}\n")
        raise typer.Exit


def _root(
    command: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if command.invoked_subcommand is None:
        terminal.write(f"{command.get_help()}\n")


def _build_app(arguments: Sequence[str]) -> typer.Typer:
    """The program with the commands that `arguments` need."""
    app = typer.Typer(
        name="llmcli",
        help="Generate text with LLaMA-family models on your own NVIDIA card, or without one.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        cls=Group,
        rich_markup_mode=None,
        context_settings={"help_option_names": list(HELP_NAMES), "max_content_width": MAX_HELP_WIDTH},
    )
    app.callback()(_root)
    add_commands(app, called=next((argument for argument in arguments if not argument.startswith("-")), None))
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every exit passes through here."""
    if _COMPLETION_VARIABLE in os.environ:
        return _complete()
    try:
        _require_current_folder()
        program = typer.main.get_command(_build_app(arguments))
        return program.main(list(arguments), prog_name="llmcli", standalone_mode=False) or 0
    except LLMCliError as error:
        return _fail(error, str(error), error.exit_code)
    except typer.TyperException as error:  # what typer itself finds wrong with the arguments
        return _fail(error, usage_message(error), UsageError.exit_code)
    except typer.Abort:  # Ctrl-C, or the end of the input, where a question was asked
        return EXIT_INTERRUPTED
    except OutputClosedError:
        return EXIT_CLOSED_PIPE
    except SystemExit as error:  # typer ends so: with 0 after --show-completion, with 1 where a pipe was closed
        return EXIT_CLOSED_PIPE if error.code else 0
    except Exception as error:
        return _fail_unknown(error)


def _complete() -> int:
    """Answer the shell's completion; on failure offer nothing and print nothing, as somebody is typing."""
    typed = next(filter(None, map(os.environ.get, _TYPED_VARIABLES)), "")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            typer.main.get_command(_build_app(typed.split()[1:])).main([], prog_name="llmcli", standalone_mode=False)
    except SystemExit as error:
        return 1 if error.code else 0
    except Exception:
        return 1
    return 0


def _require_current_folder() -> None:
    """Refuse to run in a folder that was removed: torch would end the process there without our message.

    Raises: UsageError.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be used ({error.strerror}); change to another folder") from error


def _fail_unknown(error: Exception) -> int:
    """Handle what no command caught: errors that can occur anywhere get a line, all else is a bug."""
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        give_up(sys.stdout)  # typer writes its help itself
        return _fail(error, f"the output cannot be written: {error.strerror}", OutputError.exit_code)
    if is_memory_error(error):
        ours = out_of_memory("llmcli")
        return _fail(error, str(ours), ours.exit_code)
    hint = "" if terminal.is_debug else "; --debug shows the traceback"
    return _fail(error, f"internal error, please report it: {type(error).__name__}: {error}{hint}", EXIT_BUG)


def _fail(error: Exception, message: str, exit_code: int) -> int:
    if terminal.is_debug:
        with contextlib.suppress(OutputClosedError):
            terminal.show("".join(traceback.format_exception(error)))
    with contextlib.suppress(OutputClosedError):  # stderr has no reader; the exit code still counts
        terminal.error(" ".join(message.split()))
    return exit_code


def _closed_stream(name: str) -> TextIO:
    """Replace a stream that the caller has closed. Messages go nowhere; writing a result fails."""
    mode = os.O_RDONLY if name == "stdout" else os.O_WRONLY
    return open(f"<{name}>", "w", encoding="utf-8", opener=lambda *_: os.open(os.devnull, mode))


def main() -> int:
    """Run the process's command line and return its exit code."""
    os.environ.setdefault(_NUMPY_THREADS, "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, _closed_stream(name))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    return run(sys.argv[1:])
