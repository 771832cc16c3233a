"""`llmcli tour`: its commands are real and so is their output, a reader may skip or leave, nothing remains."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from results import Llmcli

from llmcli.cli import tour
from llmcli.cli.main import run as run_here
from llmcli.cli.output.page_kit import PAGE_MARK
from llmcli.cli.output.tokens import TRUE_COLORS, level_names
from llmcli.cli.tour import TourStep, plan_tour
from llmcli.resources import STORYTELLER_BF16

LLMCLI = (sys.executable, "-m", "llmcli")
ROOT = Path(__file__).resolve().parents[2]
ASKED = "q leaves: "
LAST_LINE = "Try next: llmcli chat, or llmcli --help"
COMMANDS = [step.command for step in plan_tour(with_color=False)]
# With short texts.
SHORT_COMMANDS = {
    command: command if "--max-new-tokens" in command or "quantize" in command else f"{command} --max-new-tokens 8"
    for command in COMMANDS
}
SHORT_TOUR = f"""
import sys
from dataclasses import replace
from llmcli.cli import main, tour

plan_tour, short = tour.plan_tour, {SHORT_COMMANDS!r}
tour.plan_tour = lambda **how: tuple(replace(step, command=short[step.command]) for step in plan_tour(**how))
sys.exit(main.main())
"""


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with both streams in one pipe, as in a step."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


class Reader:
    """Somebody who takes the tour in a terminal, from the folder `here`; temporary folders are made in `temporary`."""

    def __init__(self, tmp_path: Path, *arguments: str, is_short: bool = True, **environment: str):
        self.here, self.temporary = tmp_path / "here", tmp_path / "temporary"
        self.here.mkdir(exist_ok=True)
        self.temporary.mkdir()
        settings = {**os.environ, "TERM": "xterm-256color", "TMPDIR": str(self.temporary), **environment}
        self.child = pexpect.spawn(
            sys.executable,
            [*(("-c", SHORT_TOUR) if is_short else ("-m", "llmcli")), "tour", *arguments],
            cwd=self.here,
            env={key: value for key, value in settings.items() if value},
            encoding="utf-8",
            timeout=120,
            dimensions=(24, 80),
        )

    def expect(self, text: str) -> str:
        """Wait for a text and return what came before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def answer(self, *answers: str) -> None:
        """Answer the next questions about steps."""
        for answer in answers:
            self.expect(ASKED)
            self.child.sendline(answer)

    def finish(self) -> tuple[int | None, str]:
        """Wait for the end; return the exit code and the rest of the text."""
        self.child.expect(pexpect.EOF)
        rest = str(self.child.before)
        self.child.close()
        assert list(self.temporary.iterdir()) == []
        return self.child.exitstatus, rest.replace("\r\n", "\n")


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def begin(*arguments: str, **settings: Any) -> Reader:
        readers.append(Reader(tmp_path, *arguments, **settings))
        return readers[-1]

    yield begin
    for reader in readers:
        reader.child.close(force=True)


def test_a_piped_tour_shows_what_its_commands_show_alone(tmp_path: Path) -> None:
    here, temporary, alone = tmp_path / "here", tmp_path / "temporary", tmp_path / "alone"
    for folder in (here, temporary, alone):
        folder.mkdir()
    told = run(here, "-c", SHORT_TOUR, "tour", TMPDIR=str(temporary))
    assert told.returncode == 0, told.stdout
    assert "\x1b" not in told.stdout
    assert ASKED not in told.stdout
    assert list(here.iterdir()) == list(temporary.iterdir()) == []
    assert told.stdout.endswith(f"\n\n{LAST_LINE}\n")
    rest = re.sub(r" \\\n +", " ", told.stdout)  # commands on several lines
    assert len(COMMANDS) == 6
    for command in SHORT_COMMANDS.values():
        result = run(alone, "-m", "llmcli", *shlex.split(command)[1:])
        assert result.returncode == 0
        before, shown, rest = rest.partition(f"\n  $ {command}\n\n{result.stdout}\n")
        assert shown, f"{command}\n{result.stdout}\nis not in\n{before}"


def test_colors_mean_what_the_step_says(read: Callable[..., Reader]) -> None:
    """Likely tokens are plain, the others colored, and the line above the text is a legend."""
    assert [bool(color) for color in TRUE_COLORS] == [False, True, True, True, True]
    reader = read(NO_COLOR="")
    reader.answer("s")
    text = " ".join(reader.expect(ASKED).split())
    assert "Likely tokens stay plain; the others are colored. The line above the text explains the colors." in text
    reader.child.sendline("")
    reader.expect(f"probability of each token: {level_names()[0]} · \x1b[")
    reader.expect("Once upon a time")
    reader.answer("q")
    assert reader.finish() == (0, f"q\n\n{LAST_LINE}\n")


@pytest.mark.parametrize(("arguments", "no_color"), [pytest.param((), "1", marks=pytest.mark.long), (("--plain",), "")])
def test_no_color_where_none_is_wanted(read: Callable[..., Reader], arguments: tuple[str, ...], no_color: str) -> None:
    reader = read(*arguments, NO_COLOR=no_color)
    text = ""
    if not arguments:
        text = reader.expect(ASKED)
        reader.child.sendline("s")
        text += reader.expect(ASKED)
        reader.child.sendline("")
    text += reader.expect("Ask why this word")
    assert "Here they stay plain" in " ".join(text.split())
    assert not re.search(r"\x1b\[[\d;]*m", text)
    reader.child.sendintr()
    assert reader.finish()[0] == 130


@pytest.mark.parametrize(
    ("key", "exit_code"), [("q\n", 0), pytest.param("\x04", 0, marks=pytest.mark.long), ("\x03", 130)]
)
def test_a_reader_may_leave(read: Callable[..., Reader], key: str, exit_code: int) -> None:
    reader = read()
    reader.answer("S", "what?")  # neither runs anything
    reader.expect(ASKED)
    reader.child.send(key)
    code, rest = reader.finish()
    assert code == exit_code
    assert rest.endswith(f"\n\n{LAST_LINE}\n")
    assert "3 of 6" not in rest
    assert list(reader.here.iterdir()) == []


def test_ctrl_c_in_a_step_leaves(read: Callable[..., Reader]) -> None:
    reader = read(is_short=False)
    reader.answer("")
    reader.expect("seed 1\r\n")
    reader.child.expect(r"time\S* \w+")
    reader.child.sendintr()
    code, rest = reader.finish()
    assert code == 130
    assert rest.endswith(f"\n\n{LAST_LINE}\n")
    assert "Traceback" not in rest
    assert "2 of 6" not in rest


def test_keys_typed_during_a_step_answer_no_question(read: Callable[..., Reader]) -> None:
    reader = read()
    reader.answer("s", "")
    reader.child.send("q\n")
    reader.expect("3 of 6")
    reader.answer("s")
    reader.expect("4 of 6")


def test_the_page_is_kept_beside_what_is_there(read: Callable[..., Reader], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/story.html").write_text("mine")
    reader = read()
    reader.answer("s", "s", "s", "s")
    reader.expect("Left out: it needs the model that step 4 writes.")
    reader.answer("")
    reader.expect("as story-2.html.")
    reader.expect("Enter does not: ")
    reader.child.sendline("y")
    reader.expect("Kept: story-2.html.")
    assert reader.finish()[0] == 0
    assert (reader.here / "story.html").read_text() == "mine"
    assert PAGE_MARK in (reader.here / "story-2.html").read_bytes()
    assert len(list(reader.here.iterdir())) == 2


def offer(monkeypatch: pytest.MonkeyPatch, folder: Path, page: Path, answer: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tour, "_ask", lambda question, answers: answer)
    tour._offer_page(page, is_asking=True)


@pytest.mark.parametrize("answer", ["", "n"])
def test_the_page_is_not_kept_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str) -> None:
    page = tmp_path / "story.html"
    page.write_bytes(PAGE_MARK)
    (tmp_path / "here").mkdir()
    offer(monkeypatch, tmp_path / "here", page, answer)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "story.html"
    page.write_bytes(PAGE_MARK)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("llmcli.writing.os.access", lambda path, mode: False)  # root may write anywhere
    offer(monkeypatch, tmp_path / "here", page, "y")
    assert "The page cannot be kept here: story.html cannot be written: Permission denied" in capsys.readouterr().out
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.long
def test_without_the_model_in_16_bits_two_steps_are_left_out(read: Callable[..., Reader], tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    shutil.copytree(
        ROOT / "llmcli", installed / "llmcli", ignore=shutil.ignore_patterns(STORYTELLER_BF16, "__pycache__")
    )
    reader = read(PYTHONPATH=str(installed))
    reader.answer("s", "s", "s")
    reader.expect(f"Left out: {STORYTELLER_BF16} is not part of this installation.")
    reader.expect("Left out: it needs the model that step 4 writes.")
    reader.expect("6 of 6")
    reader.answer("q")
    assert reader.finish()[0] == 0


def test_a_closed_pipe_ends_the_tour_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*LLMCLI, "tour"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"A tour of llmcli")
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_ends_the_tour(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    steps = (
        TourStep("A", "a", "llmcli --version"),
        TourStep("B", "b", "llmcli info ./nowhere"),
        TourStep("C", "c", "llmcli"),
    )
    monkeypatch.setattr(tour, "plan_tour", lambda with_color: steps)
    assert run_here(["tour", "--plain"]) == 3
    told = capfd.readouterr()
    assert told.err == "error: step 2 of the tour failed, its error is above; the other steps did not run\n"
    assert "\nerror: model folder nowhere does not exist" in told.out
    assert "3 of 3" not in told.out
    assert told.out.endswith(f"\n\n{LAST_LINE}\n")


@pytest.mark.parametrize(("closed", "exit_code"), [("<&- 2>&-", 0), (">&-", 5)])
def test_a_stream_may_be_closed(tmp_path: Path, closed: str, exit_code: int) -> None:
    code = (
        "import sys; from llmcli.cli import main, tour\n"
        "tour.plan_tour = lambda with_color: (tour.TourStep('A', 'a', 'llmcli presets'),)\n"
        "sys.exit(main.main())"
    )
    command = f"{shlex.join([sys.executable, '-c', code, 'tour'])} {closed}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == exit_code
    assert result.stderr == ("" if exit_code == 0 else "error: <stdout> cannot be written: Bad file descriptor\n")
    assert result.stdout.endswith(f"\n\n{LAST_LINE}\n") == (exit_code == 0)


def test_no_room_for_a_temporary_folder(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tour, "TemporaryDirectory", refuse)
    result = llmcli("tour")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cannot make a temporary folder (No space left on device); "
        "set TMPDIR to a folder that you can write to\n"
    )


@pytest.mark.parametrize("columns", [20, 40, 60, 120])
def test_a_command_can_be_copied_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = [tour._wrapped_command(command) for command in COMMANDS]
    assert all(one.startswith("  $ llmcli ") for one in shown)
    typed = "\n".join(one.replace("  $ llmcli", "printf '%s\\n'", 1) for one in shown)
    words = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [word for command in COMMANDS for word in shlex.split(command)[1:]]
    too_long = [line for one in shown for line in one.split("\n") if len(line) > columns]
    assert all(re.fullmatch(r'    (--\S+ )?("[^"]*"|\S+)( \\)?', line) for line in too_long)  # nowhere to break
    assert not too_long or columns < 60  # a line that the terminal breaks cannot be pasted


@pytest.mark.parametrize("columns", [40, 60, 120])
@pytest.mark.parametrize("with_color", [False, True])
def test_sentences_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, with_color: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for step in plan_tour(with_color=with_color):
        tour._say(step.text)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= min(columns, 80)
    assert " ".join(shown.split()) == " ".join(step.text for step in plan_tour(with_color=with_color))
