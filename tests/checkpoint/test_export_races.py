"""Two `quantize` into one destination, and `quantize` killed: at any moment, one whole export and nothing else.

Three of each by default; `--export-races 200` for more.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from exports import contents, write_model

CHOICES = (
    ("--bits", "8"),
    ("--bits", "4", "--group-size", "32"),
    ("--bits", "4", "--group-size", "64", "--asymmetric"),
)
SHARDS = ("--shard-size", "0.05MB")
BEING_WRITTEN = re.compile(r"error: .* is being written by process (\d+) on \S+ since [\d-]+ [\d:]+ UTC; wait")


def start(source: Path, destination: Path, choices: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmcli", "quantize", str(source), str(destination), *SHARDS, *choices]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


@dataclass(frozen=True)
class Alone:
    """The exports of undisturbed runs, by their choices.

    One run took `seconds`, `seconds_of_work` of them after it began to write.
    """

    source: Path
    exports: dict[tuple[str, ...], dict[str, bytes]]
    seconds: float
    seconds_of_work: float


def wait_for_work(process: subprocess.Popen[str], parent: Path) -> None:
    """Wait until a run begins to write, or ends."""
    while process.poll() is None and not any(parent.glob(".export.partial-*/*")):
        time.sleep(0.001)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    source = write_model(folder / "source", num_hidden_layers=12)
    exports = {}
    seconds = []
    for index, choices in enumerate(CHOICES):
        destination = folder / str(index) / "export"
        begin = time.monotonic()
        process = start(source, destination, choices)
        wait_for_work(process, destination.parent)
        work_begin = time.monotonic()
        assert finish(process)[0] == 0
        seconds.append((time.monotonic() - begin, time.monotonic() - work_begin))
        exports[choices] = contents(destination)
    return Alone(source, exports, *sorted(seconds)[1])


def make_destination(alone: Alone, parent: Path, *, exists: bool) -> Path:
    """A destination in a folder of its own; one that exists holds the source's model."""
    parent.mkdir()
    if exists:
        shutil.copytree(alone.source, parent / "export")
    return parent / "export"


@pytest.mark.timeout(0)
def test_two_runs_into_one_destination(alone: Alone, tmp_path: Path, num_export_races: int) -> None:
    chooser = random.Random(num_export_races)
    num_refused = num_replaced = 0
    for index in range(num_export_races):
        existed = chooser.random() < 0.25
        destination = make_destination(alone, tmp_path / str(index), exists=existed)
        choices = [chooser.choice(CHOICES) for _ in range(2)]
        forces = [chooser.random() < 0.5 for _ in range(2)]
        processes = []
        for choice, force in zip(choices, forces, strict=True):
            processes.append(start(alone.source, destination, (*choice, "--force") if force else choice))
            if len(processes) == 1:
                time.sleep(chooser.random() * alone.seconds)
        results = [finish(process) for process in processes]
        story = json.dumps([choices, forces, existed, results])
        winners = [choice for choice, (code, _) in zip(choices, results, strict=True) if code == 0]
        for process, (code, stderr) in zip(reversed(processes), results, strict=True):
            held = BEING_WRITTEN.search(stderr)
            assert code == 0 or (code == 2 and (held or "exists; give another folder" in stderr)), story
            assert not held or int(held[1]) == process.pid, story  # the other one
            num_refused += held is not None
        assert winners or (existed and not any(forces)), story
        assert len(winners) < 2 or any(forces), story
        num_replaced += len(winners) == 2
        expected = [alone.exports[choice] for choice in winners] or [contents(alone.source)]
        assert contents(destination) in expected, story
        assert [path.name for path in destination.parent.iterdir()] == ["export"], story
        shutil.rmtree(destination.parent)
    print(f"\n{num_export_races} pairs: {num_refused} refused, {num_replaced} replaced the other's")


@pytest.mark.timeout(0)
def test_kills(alone: Alone, tmp_path: Path, num_export_races: int) -> None:
    """By SIGKILL, once or twice, then resumed or run with other choices."""
    chooser = random.Random(num_export_races)
    num_begun = num_resumed = 0
    for index in range(num_export_races):
        existed = chooser.random() < 0.5
        destination = make_destination(alone, tmp_path / str(index), exists=existed)
        choices = chooser.choice(CHOICES)
        force = ("--force",) if existed else ()
        whole = [alone.exports[choices], *([contents(alone.source)] if existed else [])]
        for _ in range(chooser.randint(1, 2)):
            process = start(alone.source, destination, (*choices, *force))
            if chooser.random() < 0.3:
                time.sleep(chooser.random() * alone.seconds)
            else:  # a run of such a small model is mostly its start
                wait_for_work(process, destination.parent)
                time.sleep(chooser.random() * alone.seconds_of_work)
            process.send_signal(signal.SIGKILL)
            finish(process)
            hidden = {path.name.split("-")[0] for path in destination.parent.iterdir() if path != destination}
            num_begun += bool(hidden)
            if destination.exists():
                assert contents(destination) in whole
            else:
                assert not existed or ".export.replaced" in hidden
        if chooser.random() < 0.3:
            choices = chooser.choice(CHOICES)
        code, stderr = finish(start(alone.source, destination, (*choices, "--force")))
        num_resumed += "resuming: " in stderr
        assert code == 0, stderr
        assert contents(destination) == alone.exports[choices]
        assert [path.name for path in destination.parent.iterdir()] == ["export"]
        shutil.rmtree(destination.parent)
    print(f"\n{num_export_races} kills: {num_begun} left something, {num_resumed} were resumed")
