"""How long running rows wait for newcomers' prompts on this card: the time from a row's token to its next one.

    python -m scripts.benchmark_waiting [SHAPE] [--rows N] [--prompts N...] [--newcomers N] [--folder MODEL]

Rows that run all the while are timed alone first, then while prompts of a length come one after the other. A newcomer
chooses a few tokens and leaves. Weights are random, int8 groups of 128; they are written to a scratch folder unless a
model's folder is given.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import write_shape
from llmcli.engine.request import Finished, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.runners.cuda.load.model import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import NoText

NEW_TOKENS = 8
DEPTH, STEPS_ALONE = 128, 200
SAMPLER = Sampler(SamplingParams(temperature=0.0), seed=0)


def prompt(runner: Runner, num_tokens: int) -> tuple[int, ...]:
    """A prompt that was not run before."""
    return tuple(random.choices(range(runner.config.vocab_size), k=num_tokens))


class Waits:
    """The rows that run all the while, and newcomers.

    Attributes: seconds: from each token of those rows to the next; num_finished: newcomers that have left
    """

    def __init__(self, runner: Runner, num_rows: int):
        self._scheduler = Scheduler(runner, NoText(runner.config.vocab_size))
        self._runner = runner
        self.seconds: list[float] = []
        self.num_finished = 0
        self._latest = {self.submit(DEPTH, None): 0.0 for _ in range(num_rows)}
        while min(self._latest.values()) == 0:
            self.step()

    def submit(self, num_tokens: int, max_new_tokens: int | None) -> int:
        """Queue a text after a new prompt."""
        return self._scheduler.submit(Request(prompt(self._runner, num_tokens), SAMPLER, (0,), max_new_tokens))

    def step(self) -> None:
        """Run a step, and note how long each row has waited."""
        events = self._scheduler.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token) and event.request in self._latest:
                self.seconds.append(now - self._latest[event.request])
                self._latest[event.request] = now
            elif isinstance(event, Finished):
                self.num_finished += 1

    def stop(self) -> None:
        """End all rows."""
        for number in self._latest:
            self._scheduler.cancel(number)


def report(name: str, seconds: list[float], tokens_per_second: str = "") -> None:
    """Print one row; times are in milliseconds."""
    ordered = sorted(1e3 * value for value in seconds)
    high = ordered[int(0.99 * len(ordered))]
    print(f"{name:<24} {statistics.median(ordered):>8.1f} {high:>8.1f} {ordered[-1]:>8.1f} {tokens_per_second:>12}")


def measure(runner: Runner, num_rows: int, num_tokens: int, num_newcomers: int) -> None:
    """Time rows while newcomers' prompts run of one length."""
    waits = Waits(runner, num_rows)
    waits.seconds.clear()
    begin = time.perf_counter()
    for _ in range(num_newcomers):
        waits.submit(num_tokens, NEW_TOKENS)
    while waits.num_finished < num_newcomers:
        waits.step()
    rate = num_newcomers * num_tokens / (time.perf_counter() - begin)
    report(f"prompts of {num_tokens}", waits.seconds, f"{rate:,.0f}")
    waits.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="Llama-3.1-8B")
    parser.add_argument("--rows", type=int, default=4, help="rows that run all the while")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048, 8000])
    parser.add_argument("--newcomers", type=int, default=24)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder
        if folder is None:
            folder = Path(scratch) / "model"
            write_shape(options.shape, "int8", folder, lambda done, total: None)
        context = max(options.prompts) + 4096
        runner = load(open_model(folder), max_seq_len=context, num_rows=options.rows + 4)
    print(f"{runner.description}, {options.rows} rows")
    print(f"{'':<24} {'median':>8} {'99 %':>8} {'longest':>8} {'tokens/s':>12}")
    waits = Waits(runner, options.rows)
    waits.seconds.clear()
    for _ in range(STEPS_ALONE):
        waits.step()
    report("alone", waits.seconds)
    waits.stop()
    for num_tokens in options.prompts:
        measure(runner, options.rows, num_tokens, options.newcomers)


if __name__ == "__main__":
    main()
