"""`llmcli tour`: one minute with the built-in storyteller, each step a real command with its real output."""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.options import DebugOption
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.resources import STORYTELLER, STORYTELLER_16_BIT

FOLDER = Path("llmcli-tour")
_WISH = "Tell me a story about a fox named Mirabel who found a silver key."
_OPENING = ("generate", "Once upon a time", "--seed", "1")


@dataclass(frozen=True)
class Stop:
    """One stop of the tour: what there is to see, and the command that shows it."""

    title: str
    text: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command as one would type it."""
        return shlex.join(("llmcli", *self.arguments))


def plan_tour(folder: Path) -> tuple[Stop, ...]:
    """The stops in their order; what they write goes into `folder`."""
    int4, page = str(folder / f"{STORYTELLER}-int4"), str(folder / "story.html")
    return (
        Stop("Write", "A model of 11 million parameters comes with llmcli. Same seed, same story.", _OPENING),
        Stop(
            "See the probabilities",
            "How sure was it? Green tokens were likely, red ones unlikely.",
            (*_OPENING, "--max-new-tokens", "60", "--color", "prob"),
        ),
        Stop(
            "Ask why this word",
            "Each step of the sampler removes candidates; one of those that remain is drawn.",
            (*_OPENING, "--max-new-tokens", "4", "--why"),
        ),
        Stop(
            "Quantize",
            "The same model in 16 bits is at hand too. Its linear layers become 4 bits a weight.",
            ("quantize", STORYTELLER_16_BIT, int4, "--bits", "4", "--force"),
        ),
        Stop(
            "See what that cost",
            "Both models read one text. Where do they disagree?",
            ("diff", STORYTELLER_16_BIT, int4, "Once upon a time"),
        ),
        Stop(
            "Keep the page",
            "Ask for a story of your own. The page for your browser shows every token, and what else was likely.",
            ("generate", "--chat", _WISH, "--seed", "2", "--html", page, "--force"),
        ),
    )


def tour(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where the tour writes what it makes.", show_default=True)
    ] = FOLDER,
    plain: Annotated[bool, typer.Option("--plain", help="Run all steps without asking, as in a pipe.")] = False,
    debug: DebugOption = False,
) -> None:
    """Try everything in one minute, with the built-in storyteller.

    Each step shows a command, runs it, and leaves you its real output.

    [bold]Examples[/bold]

    llmcli tour

    llmcli tour --plain
    """
    _make(folder)
    is_asking = not plain and sys.stdin.isatty() and sys.stdout.isatty()
    stops = plan_tour(folder)
    for number, stop in enumerate(stops, start=1):
        terminal.show(f"\n{number} of {len(stops)}: {stop.title}\n{stop.text}\n\n    $ {stop.command}\n\n")
        answer = _ask() if is_asking else ""
        if answer == "q":
            break
        if answer != "s":
            _run(stop)
    terminal.show(
        f"\nWhat the tour made lies in {folder}; delete it when you like.\n"
        "Next: llmcli chat, llmcli --help, or a model of your own with --model.\n"
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {folder} ({error.strerror}); name another: llmcli tour FOLDER"
        ) from error


def _ask() -> str:
    """The reader's choice: nothing to run the command, `s` to skip it, `q` to leave. The end of the input leaves."""
    terminal.show("Enter runs it, s skips it, q leaves: ")
    try:
        return input().strip().lower()[:1]
    except EOFError:
        return "q"


def _run(stop: Stop) -> None:
    """Run a stop's command as a program of its own, with these streams. A command that fails ends the tour."""
    finished = subprocess.run([sys.executable, "-m", "llmcli", *stop.arguments], stdin=subprocess.DEVNULL, check=False)
    if finished.returncode:
        raise typer.Exit(finished.returncode)
