"""What Ray costs a batch, and what more cards bring.

    python -m scripts.benchmark_ray driver [--lines N ...] [--workers N]
    python -m scripts.benchmark_ray cards [--shape NAME] [--format int8] [--prompts N] [--tokens N] [--cards N ...]

`driver`: workers that answer at once, so that all the time is the driver's; its memory at five moments of each run.
`cards`: `llmcli batch --ray auto` with 1, 2, ... workers, on random weights that are written first. "run" is from the
first prompt to the last token, as --stats has it; "all" has the start of Ray and the loading too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import write_shape
from llmcli.cli import batch
from llmcli.cli.main import run
from llmcli.engine.remote.worker import EngineFacts, OpenedEngine
from llmcli.engine.request import Event, Finished, Request, Timings
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
    files = batch.model_files(resource_folder(STORYTELLER))
    return OpenedEngine(Instant(), lambda request, grammar: request, EngineFacts("nothing", 0.0, files, 256))


def drive(*arguments: str) -> None:
    """Be the driver of workers that answer at once."""
    batch.open_far_engine = open_instant
    sys.exit(run(["batch", *arguments]))


def write_prompts(path: Path, count: int, num_repeats: int = 1) -> None:
    """Prompts of a number and 4 to 11 words, or so many times as many, with ids of their own."""
    with path.open("w") as file:
        for number in range(count):
            prompt = " ".join([str(number), *WORDS[: 4 + number % 8] * num_repeats])
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
    seen: list[tuple[int, int]] = []  # the output's bytes, the driver's memory
    while driver.poll() is None:
        if output.exists():
            seen.append((output.stat().st_size, psutil.Process(driver.pid).memory_info().rss))
        time.sleep(0.2)
    stderr = driver.communicate()[1]
    assert driver.returncode == 0, stderr
    seconds, size = stat(stderr, "run"), output.stat().st_size
    with output.open("rb") as file:
        assert sum(1 for _ in file) == count
    moments = [next(memory for done, memory in seen if done >= part * size / 4.01) for part in range(5)]
    memory = ", ".join(f"{moment / 2**20:.0f}" for moment in moments)
    rate = f"{seconds:.1f} s, {60 * count / seconds:.0f} lines a minute"
    print(f"{count} lines, {num_workers} worker(s): {rate}; memory {memory} MiB", flush=True)


def write_model(shape: str, form: str, folder: Path) -> None:
    """A shape with random weights, and a tokenizer with a token for each byte, and words that no prompt has."""
    write_shape(shape, form, folder, lambda done, total: None)
    symbols = sorted(ByteLevel.alphabet())
    symbols += [f"<{number}>" for number in range(open_model(folder).config.vocab_size - len(symbols))]
    tokenizer = Tokenizer(BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))


def measure_cards(folder: Path, options: argparse.Namespace) -> None:
    """Run a batch with each number of cards, and print times and ratios."""
    model, source, output = folder / "model", folder / "in.jsonl", folder / "out.jsonl"
    begin = time.perf_counter()
    write_model(options.shape, options.format, model)
    print(f"{options.shape} {options.format}: written in {time.perf_counter() - begin:.1f} s", flush=True)
    write_prompts(source, options.prompts, 4)
    flags = ["--seed", "1", "--max-new-tokens", str(options.tokens), "--ignore-eos", "--stats", "--ray", "auto"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    times: dict[int, tuple[float, float]] = {}
    for count in options.cards:
        for path in (output, output.with_name("out.jsonl.run.json")):
            path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "llmcli", "batch", source, output, "-m", model, *flags]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, "--workers", str(count)], env=environment, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        times[count] = run, whole = stat(done.stderr, "run"), time.perf_counter() - begin
        rate = options.prompts * options.tokens / run
        print(f"{count} card(s): run {run:.1f} s, {rate:.0f} new tokens/s, all {whole:.1f} s", flush=True)
    first = options.cards[0]
    for count in options.cards[1:]:
        run, whole = (one / other for one, other in zip(times[first], times[count], strict=True))
        print(f"{count} cards over {first}: run {run:.2f} times as fast, all {whole:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    driver = commands.add_parser("driver")
    driver.add_argument("--lines", type=int, nargs="+", default=[20_000, 100_000])
    driver.add_argument("--workers", type=int, default=1)
    cards = commands.add_parser("cards")
    cards.add_argument("--shape", default="Llama-3.1-8B")
    cards.add_argument("--format", default="int8")
    cards.add_argument("--prompts", type=int, default=2000)
    cards.add_argument("--tokens", type=int, default=256)
    cards.add_argument("--cards", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.command == "cards":
            measure_cards(Path(name), options)
        else:
            for count in options.lines:
                measure_driver(count, options.workers, Path(name))


if __name__ == "__main__":
    main()
