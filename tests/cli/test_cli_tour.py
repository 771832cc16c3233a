"""`llmcli tour`: its commands are real, their output is theirs, and a reader may skip or leave."""

import shlex
import subprocess
import sys
from pathlib import Path

import pexpect

from llmcli.cli.tour import plan_tour

LLMCLI = (sys.executable, "-m", "llmcli")
ASKED = "q leaves: "


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LLMCLI, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def test_a_plain_tour_shows_what_its_commands_show_alone(tmp_path: Path) -> None:
    there, alone = tmp_path / "there", tmp_path / "alone"
    there.mkdir()
    (alone / "llmcli-tour").mkdir(parents=True)
    told = run(there, "tour", "--plain")
    assert told.returncode == 0, told.stderr
    commands = [line.removeprefix("    $ ") for line in told.stderr.splitlines() if line.startswith("    $ ")]
    assert len(commands) == 6
    results = [run(alone, *shlex.split(command)[1:]) for command in commands]
    assert told.stdout == "".join(result.stdout for result in results)
    assert [path.name for path in sorted((there / "llmcli-tour").iterdir())] == ["story.html", "storyteller-int4"]
    assert (there / "llmcli-tour/story.html").stat().st_size == (alone / "llmcli-tour/story.html").stat().st_size


def test_a_reader_may_skip_and_leave(tmp_path: Path) -> None:
    child = pexpect.spawn(sys.executable, ["-m", "llmcli", "tour"], cwd=tmp_path, encoding="utf-8", timeout=120)
    child.expect(ASKED)
    child.sendline("s")
    child.expect("2 of 6")
    child.expect(ASKED)
    child.sendline("")
    child.expect("storyteller: ")  # the command's own line about the run
    child.expect("3 of 6")
    child.expect(ASKED)
    child.sendline("q")
    child.expect("delete it when you like")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert list((tmp_path / "llmcli-tour").iterdir()) == []


def test_a_command_that_fails_ends_the_tour_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "llmcli-tour/storyteller-int4").mkdir(parents=True)
    (tmp_path / "llmcli-tour/storyteller-int4/mine.txt").write_text("not a model")
    told = run(tmp_path, "tour", "--plain")
    assert told.returncode == 2
    assert "4 of 6" in told.stderr
    assert "5 of 6" not in told.stderr


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = run(tmp_path, "tour", "file", "--plain")
    assert told.returncode == 2
    assert "file" in told.stderr.splitlines()[-1]


def test_what_the_tour_writes_goes_into_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    written = [word for stop in plan_tour(folder) for word in stop.arguments if "story.html" in word or "int4" in word]
    assert written
    assert all(Path(word).parent == folder for word in written)
