"""Steps of one row with drafts on the CPU: how long a step of 1 to 8 tokens takes, all drafts right or all wrong.

The models are those of `benchmark_cpu_decode`. Rounds alternate between the numbers of drafts; medians are compared.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from llmcli.runners.base import Runner, Span
from llmcli.sampling.params import Sampler, SamplingParams
from scripts.benchmark_cpu_decode import SCHEMES, clock, open_runner, quantize, write_model

PROMPT = tuple(range(16))
NUM_DRAFTS = (0, 1, 3, 7)
NUM_TOKENS = 24


def open_row(runner: Runner) -> tuple[int, int]:
    """A row that has chosen a token, and that token."""
    row = runner.open(PROMPT, Sampler(SamplingParams(temperature=0.0), seed=0))
    (chosen,) = runner.queue([Span(row, PROMPT[runner.num_tokens(row) :])]).choices()
    assert isinstance(chosen, tuple)
    return row, chosen[-1].token_id


def text_of(runner: Runner) -> list[int]:
    """The model's tokens."""
    row, first = open_row(runner)
    said = [first]
    while len(said) < NUM_TOKENS:
        (chosen,) = runner.queue([Span(row)]).choices()
        assert isinstance(chosen, tuple)
        said.append(chosen[-1].token_id)
    runner.close(row)
    return said


def seconds_of_step(runner: Runner, text: list[int], num_drafts: int, *, is_right: bool) -> float:
    """Seconds of a step after the first tokens of the text."""
    row, _ = open_row(runner)
    drafts = text[1 : 1 + num_drafts] if is_right else [(token_id + 1) % 32000 for token_id in text[1 : 1 + num_drafts]]
    start = clock()
    (chosen,) = runner.queue([Span(row, drafts=tuple(drafts))]).choices()
    seconds = clock() - start
    assert isinstance(chosen, tuple)
    assert len(chosen) == (1 + num_drafts if is_right else 1)
    runner.close(row)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--schemes", nargs="*", default=["int8 channel", "int4 groups of 128"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "bf16"
        write_model(original, arguments.layers)
        for name in arguments.schemes:
            folder = Path(scratch) / name.replace(" ", "-")
            quantize(original, folder, SCHEMES[name])
            runner = open_runner(folder, arguments.threads)
            text = text_of(runner)
            times: dict[tuple[int, bool], list[float]] = defaultdict(list)
            for _ in range(arguments.rounds):
                for num_drafts in NUM_DRAFTS:
                    for is_right in (True, False):
                        seconds = seconds_of_step(runner, text, num_drafts, is_right=is_right)
                        times[num_drafts, is_right].append(seconds)
            plain = statistics.median(times[0, True])
            print(f"{name}: {plain * 1e3:.1f} ms a step of one token")
            for num_drafts in NUM_DRAFTS[1:]:
                right, wrong = (statistics.median(times[num_drafts, is_right]) / plain for is_right in (True, False))
                print(f"  {num_drafts} drafts: {right:.2f} steps if right, {wrong:.2f} if wrong", flush=True)
