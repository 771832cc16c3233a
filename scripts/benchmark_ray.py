"""What Ray costs a batch, and what more cards bring.

    python -m scripts.benchmark_ray driver [--lines N ...] [--workers N]
    python -m scripts.benchmark_ray cards MODEL [--prompts N] [--tokens N] [--cards N ...] [--runs N]

`driver`: workers that answer at once, so that all the time is the driver's; the growth of its memory over each run.
`cards`: whole runs of `llmcli batch` with --ray auto and 1, 2, ... workers, in alternating runs, start and loading
included, and by their --stats the runs alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from llmcli.cli import batch_engines
from llmcli.cli.main import run
from llmcli.engine.events import Event, Finished, Timings
from llmcli.engine.remote.asked import EngineFacts, OpenedEngine
from llmcli.engine.request import Request
from llmcli.engine.texts import Usage
from llmcli.resources import STORYTELLER, resource_folder

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["Once", "upon", "a", "time", "there", "was", "a", "quiet", "snail", "called", "Kaspar"]
TEXT, NUM_TOKENS = " there was a quiet snail" * 8, 40


class Instant:
    """A scheduler whose texts are there after one step."""

    runner: Any = SimpleNamespace()

    def __init__(self) -> None:
        self.usage = Usage(256)
        self._waiting: list[tuple[int, Request]] = []
        self._num_begun = 0

    @property
    def num_waiting(self) -> int:
        """None waits."""
        return 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left."""
        return not self._waiting

    def submit(self, request: Request) -> int:
        """Take a request."""
        self._num_begun += 1
        self._waiting.append((self._num_begun, request))
        return self._num_begun

    def cancel(self, request: int) -> None:
        """Nothing to cancel."""

    def interrupt(self) -> list[Event]:
        """Do nothing."""
        return []

    def step(self) -> list[Event]:
        """End all texts."""
        self.usage.steps += 1
        timings = Timings(0, 0.0, 0.0, 0, 0.0)
        waiting, self._waiting = self._waiting, []
        ids = tuple(range(100, 100 + NUM_TOKENS))
        return [Finished(one.samples[0], "", TEXT, ids, "length", timings, number) for number, one in waiting]


def open_instant(*_: object) -> OpenedEngine:
    """The engine of a worker that answers at once."""
    files = batch_engines.model_files(resource_folder(STORYTELLER))
    return OpenedEngine(Instant(), lambda request, grammar: request, EngineFacts("nothing", 0.0, files, 256))


def drive(*arguments: str) -> None:
    """Be the driver of workers that answer at once."""
    batch_engines.open_far_engine = open_instant
    sys.exit(run(["batch", *arguments]))


def write_prompts(path: Path, count: int) -> None:
    """Prompts of a few words, with ids of their own."""
    with path.open("w") as file:
        for number in range(count):
            prompt = " ".join(WORDS[: 4 + number % 8])
            file.write(json.dumps({"id": f"prompt-{number:08}", "prompt": prompt}) + "\n")


def stat(stderr: str, name: str) -> float:
    """The first number of a line of --stats."""
    found = re.search(rf"^{name} +([0-9.]+)", stderr, re.MULTILINE)
    assert found is not None, stderr
    return float(found[1])


def measure_driver(count: int, num_workers: int, folder: Path) -> None:
    """Run so many lines, and print the driver's speed and memory."""
    source, output = folder / "in.jsonl", folder / f"out-{count}.jsonl"
    write_prompts(source, count)
    call = "import sys; from scripts.benchmark_ray import drive; drive(*sys.argv[1:])"
    flags = ("--seed", "1", "--ray", "auto", "--device", "cpu", "--workers", str(num_workers), "--stats")
    command = [sys.executable, "-c", call, str(source), str(output), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    first = most = 0
    while driver.poll() is None:
        memory = psutil.Process(driver.pid).memory_info().rss
        if first == 0 and output.exists() and output.stat().st_size:
            first = memory
        most = max(most, memory)
        time.sleep(0.2)
    stderr = driver.communicate()[1]
    assert driver.returncode == 0, stderr
    seconds = stat(stderr, "run")
    with output.open("rb") as file:
        assert sum(1 for _ in file) == count
    print(
        f"{count} lines, {num_workers} worker(s): {seconds:.1f} s, {60 * count / seconds:.0f} lines a minute; "
        f"memory of the driver {first / 2**20:.0f} MiB at the first line, {most / 2**20:.0f} MiB at most",
        flush=True,
    )


def measure_cards(model: str, num_prompts: int, num_tokens: int, cards: list[int], num_runs: int) -> None:
    """Run a batch with each number of cards, and print times and ratios."""
    whole: dict[int, list[float]] = {count: [] for count in cards}
    alone: dict[int, list[float]] = {count: [] for count in cards}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        write_prompts(source, num_prompts)
        for _ in range(num_runs):
            for count in cards:
                output = Path(name) / "out.jsonl"
                for path in (output, output.with_name("out.jsonl.run.json")):
                    path.unlink(missing_ok=True)
                flags = ("--seed", "1", "--max-new-tokens", str(num_tokens), "--ignore-eos", "--stats")
                command = ["batch", str(source), str(output), "-m", model, *flags, "--ray", "auto"]
                begin = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-m", "llmcli", *command, "--workers", str(count)],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stderr=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                whole[count].append(time.perf_counter() - begin)
                alone[count].append(stat(done.stderr, "run"))
                tokens = re.search(r"[0-9.]+ tokens/s", done.stderr)
                print(f"{count} card(s): whole {whole[count][-1]:.1f} s, run {alone[count][-1]:.1f} s", end=", ")
                print(tokens[0] if tokens else "", flush=True)
    for count in cards[1:]:
        for what, seconds in (("whole run", whole), ("run without start and loading", alone)):
            ratio = statistics.median(seconds[cards[0]]) / statistics.median(seconds[count])
            print(f"{count} cards, {what}: {ratio:.2f} times as fast as {cards[0]}, by medians")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    driver = commands.add_parser("driver")
    driver.add_argument("--lines", type=int, nargs="+", default=[20_000, 100_000])
    driver.add_argument("--workers", type=int, default=1)
    cards = commands.add_parser("cards")
    cards.add_argument("model")
    cards.add_argument("--prompts", type=int, default=2000)
    cards.add_argument("--tokens", type=int, default=256)
    cards.add_argument("--cards", type=int, nargs="+", default=[1, 2])
    cards.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    if options.command == "cards":
        measure_cards(options.model, options.prompts, options.tokens, options.cards, options.runs)
        return
    with tempfile.TemporaryDirectory() as name:
        for count in options.lines:
            measure_driver(count, options.workers, Path(name))


if __name__ == "__main__":
    main()
