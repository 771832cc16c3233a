"""Texts side by side from their prompts to their last tokens, on a card: new tokens/s of the whole run.

    python -m scripts.benchmark_whole_run MODEL [--texts N] [--prompt N] [--tokens N] [--context N] [--runs N]

Random prompts of one length, all there at once as in `batch`, greedy. The first run is not counted. MODEL is a folder.
"""

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from llmcli.checkpoint.model import open_model
from llmcli.cli.run import loaded_objects_set_aside
from llmcli.engine.request import Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.runners.cuda.load.model import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import NoText


def run(runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Generate all texts; return the seconds. Raises: AssertionError for a text of another length"""
    scheduler = Scheduler(runner, NoText(runner.config.vocab_size), wait_seconds=math.inf)
    sampler = Sampler(SamplingParams(temperature=0.0), seed=0)
    start = perf_counter()
    for prompt in prompts:
        scheduler.submit(Request(tuple(prompt), sampler, samples=(0,), max_new_tokens=num_tokens))
    told = 0
    while not scheduler.is_idle:
        told += sum(isinstance(event, Token) for event in scheduler.step())
    seconds = perf_counter() - start
    assert told == len(prompts) * num_tokens
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    generator = random.Random(0)
    runner = load(
        open_model(options.model),
        max_seq_len=options.context,  # a pass of prompts has no more tokens than a row
        num_rows=options.texts,
    )
    times = []
    with loaded_objects_set_aside():  # as in `batch`
        for _ in range(1 + options.runs):
            ids = range(runner.config.vocab_size)
            prompts = [generator.choices(ids, k=options.prompt) for _ in range(options.texts)]
            times.append(run(runner, prompts, options.tokens))
    rates = [options.texts * options.tokens / seconds for seconds in times[1:]]
    print(f"{statistics.median(rates):,.0f} new tokens/s ({min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
