"""Two `quantize` into one destination: at the end one whole export, of a run that succeeded, and nothing else.

Three pairs by default; `--export-races 200` for more. Kills are those of test_export_resume.py.
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from exports import contents, write_model

from llmcli.cli.main import run

CHOICES = (
    ("--bits", "8"),
    ("--bits", "4", "--group-size", "32"),
    ("--bits", "4", "--group-size", "64", "--asymmetric"),
)
SHARDS = ("--shard-size", "0.05MB")
BEING_WRITTEN = re.compile(r"error: .* is being written by process (\d+) on \S+ since [\d-]+ [\d:]+ UTC; wait")


class Run:
    """`llmcli quantize` in a fork, whose imports are done."""

    def __init__(self, source: Path, destination: Path, choices: tuple[str, ...]):
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(stderr.fileno(), 2)
            sys.stdout, sys.stderr = open(os.devnull, "w"), open(2, "w", closefd=False)  # noqa: SIM115
            code = 1
            try:
                code = run(["quantize", str(source), str(destination), *SHARDS, *choices])
            finally:
                sys.stderr.flush()
                os._exit(code)
        self._stderr = stderr

    def finish(self) -> tuple[int, str]:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._stderr.seek(0)
        return code, self._stderr.read()


@dataclass(frozen=True)
class Alone:
    """The exports of undisturbed runs, by their choices, and the seconds that one took."""

    source: Path
    exports: dict[tuple[str, ...], dict[str, bytes]]
    seconds: float


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    source = write_model(folder / "source", num_hidden_layers=12)
    exports = {}
    seconds = []
    for index, choices in enumerate(CHOICES):
        destination = folder / str(index) / "export"
        begin = time.monotonic()
        assert Run(source, destination, choices).finish()[0] == 0
        seconds.append(time.monotonic() - begin)
        exports[choices] = contents(destination)
    return Alone(source, exports, sorted(seconds)[1])


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
            processes.append(Run(alone.source, destination, (*choice, "--force") if force else choice))
            if len(processes) == 1:
                time.sleep(chooser.random() * alone.seconds)
        results = [process.finish() for process in processes]
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
