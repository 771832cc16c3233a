"""`llmcli tour`: one minute with the built-in storyteller, each step a real command with its real output.

The steps are processes of their own in a temporary folder. The tour is its own result, so all of it goes to stdout.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from llmcli.cli import lazy, shared
from llmcli.cli.command import option
from llmcli.cli.output.page_kit import PAGE
from llmcli.cli.terminal import has_color, terminal
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.resources import STORYTELLER_BF16, built_in_model

MAX_COLUMNS = 80
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_STORY = 'llmcli generate "Once upon a time" --seed 1'
_INT4, _PAGE = "story-int4", "story.html"


# An option with its value, or any other word of a command.
_WORDS = re.compile(r'(?:--\S+ )?(?:"[^"]*"|[^\s-]\S*)|\S+')


@dataclass(frozen=True)
class TourStep:
    """One step: what it shows, and its command as typed.

    `needs` is a built-in model, or what an earlier step writes; `without` says why the step is skipped if it is
    missing.
    """

    title: str
    text: str
    command: str
    needs: str = ""
    without: str = ""

    def is_possible(self, folder: Path) -> bool:
        """Whether what the step needs exists."""
        return not self.needs or built_in_model(self.needs) is not None or (folder / self.needs).exists()


def plan_tour(*, with_color: bool) -> tuple[TourStep, ...]:
    """The steps in their order."""
    return (
        TourStep("Write", "The model continues your words. The same seed gives the same story again.", _STORY),
        TourStep(
            "See the probabilities",
            "How sure was the model? Likely tokens stay plain; the others are colored. "
            "The line above the text explains the colors."
            if with_color
            else "On a terminal with colors, unlikely tokens are colored. "
            "Here they stay plain, but the next step shows the probabilities as numbers.",
            f"{_STORY} --max-new-tokens 60 --color prob",
        ),
        TourStep(
            "Ask why this word",
            "The sampler removes the unlikely tokens, then draws one of the rest. "
            "The table shows both steps for each token.",
            f"{_STORY} --max-new-tokens 4 --why",
        ),
        TourStep(
            "Quantize",
            f"{STORYTELLER_BF16} is the same model with 16 bits per weight. "
            "This command writes a smaller copy, with 4 bits per weight in most layers.",
            f"llmcli quantize {STORYTELLER_BF16} {_INT4} --bits 4",
            needs=STORYTELLER_BF16,
            without=f"Left out: {STORYTELLER_BF16} is not part of this installation.",
        ),
        TourStep(
            "See what it cost",
            "The 16-bit model writes, and the 4-bit model reads along. "
            "[a>b] means that it would have written b instead of a. The last line sums up.",
            f'llmcli diff {STORYTELLER_BF16} {_INT4} "Once upon a time"',
            needs=_INT4,
            without="Left out: it needs the model that step 4 writes.",
        ),
        TourStep(
            "Keep the page",
            "You can also ask for a story. This command saves it as a page for your browser, "
            "which shows what else could have stood at each token.",
            f'llmcli generate --chat "Tell me a story about a fox." --seed 2 --html {_PAGE}',
        ),
    )


def tour(
    plain: bool = option(False, "Run all steps, without questions or colors."),
    debug: bool = shared.debug_option(),
) -> None:
    """Try llmcli in one minute, with the built-in storyteller.

    Each step shows a command and runs it. Nothing is written to the current folder unless you agree.

    Examples:

    llmcli tour

    llmcli tour --plain | less
    """
    has_reader = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()  # None: the caller closed it
    is_asking = has_reader and not plain
    exit_code = failed_step = 0
    try:
        with _temporary_folder() as name:
            exit_code, failed_step = _walk(Path(name), is_asking, with_color=not plain and has_color(sys.stdout))
    except KeyboardInterrupt:
        terminal.write("\n")
        exit_code = EXIT_INTERRUPTED
    _say("\nTry next: llmcli chat, or llmcli --help")
    if failed_step:
        terminal.error(f"step {failed_step} of the tour failed, its error is above; the other steps did not run")
    raise typer.Exit(exit_code)


def _temporary_folder() -> TemporaryDirectory[str]:
    try:
        return TemporaryDirectory(prefix="llmcli-tour-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot make a temporary folder ({error.strerror}); set TMPDIR to a folder that you can write to"
        ) from error


def _walk(folder: Path, is_asking: bool, *, with_color: bool) -> tuple[int, int]:
    """Take the steps in their order; return the exit code and the number of a step that failed, or zeros.

    Raises: KeyboardInterrupt.
    """
    steps = plan_tour(with_color=with_color)
    _say(
        f"A tour of llmcli in {len(steps)} steps, about a minute in all. It uses the storyteller, a small model that "
        "comes with llmcli. What the steps write goes to a temporary folder."
    )
    for number, step in enumerate(steps, start=1):
        _show(f"{number} of {len(steps)}: {step.title}", with_color=with_color)
        _say(step.text)
        _show(_wrapped_command(step.command), with_color=with_color)
        terminal.write("\n")
        if not step.is_possible(folder):
            _say(step.without)
            continue
        answer = _ask("Enter runs it, s skips it, q leaves: ", ("", "s", "q")) if is_asking else ""
        if answer == "q":
            return 0, 0
        if answer == "" and (exit_code := _run(step, folder, with_color=with_color)):
            return exit_code, number
    _offer_page(folder / _PAGE, is_asking)
    return 0, 0


def _run(step: TourStep, folder: Path, *, with_color: bool) -> int:
    """Run a step's command in the folder and return its exit code.

    It finds the package that this process runs.

    Raises: KeyboardInterrupt when the command has ended.
    """
    search_path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
    kept = {name: text for name, text in os.environ.items() if name == "LLMCLI_HOME" or not name.startswith("LLMCLI_")}
    environment = {**kept, "PYTHONPATH": search_path, "LLMCLI_CONFIG": ""}  # without the user's settings
    if not with_color:
        environment["NO_COLOR"] = "1"
    if terminal.is_debug:
        environment["LLMCLI_DEBUG"] = "1"
    command = [sys.executable, "-m", "llmcli", *shlex.split(step.command)[1:]]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=subprocess.STDOUT
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command got the signal too and may still write
            process.wait()
            raise


def _offer_page(page: Path, is_asking: bool) -> None:
    """Copy the page to the current folder, under a free name, if the reader wants it.

    Raises: UsageError, OutputError if it cannot be written.
    """
    if not page.exists():
        return
    if not is_asking:
        _say("\nThe page goes with the temporary folder. Run the last command yourself to keep one.")
        return
    names = (f"{page.stem}-{number}{page.suffix}" for number in count(2))
    target = page.name
    while os.path.lexists(target):
        target = next(names)
    try:
        PAGE.check(Path(target), replace=False)
    except UsageError as error:
        _say(f"\nThe page cannot be kept here: {error}")
        return
    _say(f"\nThe page can stay in the current folder, as {target}.")
    if _ask("y keeps it, Enter does not: ", ("y", "", "n")) == "y":
        PAGE.write(Path(target), page.read_bytes(), replace=False)
        _say(f"Kept: {target}. Open it in your browser.")


def _ask(question: str, answers: Sequence[str]) -> str:
    """One of the answers; at the end of the input the last one. Keys typed before the question do not count."""
    while True:
        if sys.platform != "win32":
            lazy.key_echo.discard_typed_keys()
        terminal.write(question)
        line = sys.stdin.buffer.readline()
        if not line:
            terminal.write("\n")
            return answers[-1]
        typed = line.decode(errors="replace").strip().lower()
        if typed in answers:
            return typed


def _show(text: str, *, with_color: bool) -> None:
    """Text that stands out, below an empty line."""
    terminal.write(f"\n\x1b[1m{text}\x1b[0m\n" if with_color else f"\n{text}\n", is_drawn=True)


def _say(text: str) -> None:
    """Sentences, broken between words; those that begin with a line break stand below an empty line."""
    margin = "\n" if text.startswith("\n") else ""
    terminal.write(f"{margin}{textwrap.fill(text.strip(), _columns(), break_on_hyphens=False)}\n")


def _wrapped_command(command: str) -> str:
    """The command as a shell takes it, on as many lines as it needs; an option stays with its value."""
    lines, words = ["  $"], _WORDS.findall(command)
    for number, word in enumerate(words, start=1):
        mark = "" if number == len(words) else " \\"
        if len(f"{lines[-1]} {word}{mark}") > _columns():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def _columns() -> int:
    return min(shutil.get_terminal_size((MAX_COLUMNS, 0)).columns, MAX_COLUMNS)
