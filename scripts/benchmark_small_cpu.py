"""The storyteller on the CPU by numpy and by torch: starts to the first token, prompts and decoding, in turns.

Seconds of the processor, not of the clock: so other programs disturb less. On a quiet core both are the same.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as in the command line; numpy reads it when it is imported

import numpy as np

from llmcli.checkpoint.model import open_model
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner, Span
from llmcli.runners.numpy.load import load as load_on_numpy
from llmcli.runners.torch.load import load as load_on_torch
from llmcli.sampling.params import Sampler, SamplingParams

ROUNDS = 7
NEW_TOKENS = 50
START = ["generate", "Once upon a time", "--max-new-tokens", "1", "--seed", "1", "--device", "cpu"]
FLAGS = {"numpy": [], "torch": ["--dtype", "float32"]}
GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)


def start_seconds(library: str) -> float:
    """A process that ends after one token."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "llmcli", *START, *FLAGS[library]], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_prompt(runner: Runner, prompt: Sequence[int]) -> int:
    """A new row after its prompt, with its first token chosen."""
    row = runner.open(prompt, GREEDY)
    while (begin := runner.num_tokens(row)) < len(prompt):
        end = runner.span_end(row, len(prompt))
        runner.queue([Span(row, tuple(prompt[begin:end]), "last" if end == len(prompt) else "none")]).choices()
    return row


def prompt_seconds(runner: Runner, length: int) -> float:
    """A prompt with a beginning of its own, up to the first token."""
    prompt = np.random.default_rng(time.perf_counter_ns()).integers(10, 4000, length).tolist()
    begin = time.process_time()
    row = run_prompt(runner, prompt)
    seconds = time.process_time() - begin
    runner.close(row)
    return seconds


def token_seconds(runner: Runner, depth: int) -> float:
    """A token after `depth` others."""
    row = run_prompt(runner, list(range(100, 100 + depth)))
    begin = time.process_time()
    for _ in range(NEW_TOKENS):
        runner.queue([Span(row)]).choices()
    seconds = (time.process_time() - begin) / NEW_TOKENS
    runner.close(row)
    return seconds


def compare(what: str, seconds_of: Callable[[str], float]) -> None:
    """One line: both libraries in turns."""
    times = {name: [] for name in FLAGS}
    for _ in range(ROUNDS):
        for name, values in times.items():
            values.append(seconds_of(name))
    columns = [f"{name} {statistics.median(v) * 1e3:7.1f} ms ({min(v) * 1e3:.1f})" for name, v in times.items()]
    print(f"{what:<22} {'   '.join(columns)}", flush=True)


def main() -> None:
    """Print medians, and the fastest in brackets."""
    compare("start, one token", start_seconds)
    model = open_model(resource_folder(STORYTELLER))
    runners = {"numpy": load_on_numpy(model, max_seq_len=1024), "torch": load_on_torch(model, max_seq_len=1024)}
    for length in (5, 16, 64, 256, 900):
        compare(f"prompt of {length}", lambda name, length=length: prompt_seconds(runners[name], length))
    for depth in (5, 500, 900):
        compare(f"token behind {depth}", lambda name, depth=depth: token_seconds(runners[name], depth))


if __name__ == "__main__":
    main()
