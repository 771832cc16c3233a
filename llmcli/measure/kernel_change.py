"""What the user's kernels change in a loaded model: a prompt and steps of decoding are timed, in turns with ours."""

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from llmcli.measure.bench import Way, run_in_turns
from llmcli.measure.spread import Spread, spread_of
from llmcli.runners.base import Runner, Span, spans_of_prompt
from llmcli.sampling.params import Sampler, SamplingParams

MAX_PROMPT = 512  # tokens: a longer prompt would keep the user waiting
NUM_STEPS = 16
_REPEATS = 5


@dataclass(frozen=True)
class KernelChange:
    """The user's kernels and ours: a prompt of `num_tokens` up to its next token, and a step of decoding behind it."""

    num_tokens: int
    own_prompt: Spread
    engine_prompt: Spread
    own_step: Spread
    engine_step: Spread


def measure_change(runner: Runner, engine_kernels: Way, num_tokens: int) -> KernelChange | None:
    """Time prompts of up to `num_tokens`, and steps behind them; None where the context has no room for the steps.

    In `engine_kernels()` the runner launches our kernels. The two take turns, after a run of each that warms up.
    Raises: LLMCliError and its subclasses
    """
    length = min(num_tokens, MAX_PROMPT, runner.limits.max_seq_len - NUM_STEPS - 1)
    if length < 1:
        return None
    sampler = Sampler(SamplingParams(temperature=0.0), seed=0)
    numbers = random.Random(0)

    def run() -> tuple[float, float]:
        # Other ids in each run: what the cache holds would not be run again.
        return _run(runner, numbers.choices(range(runner.config.vocab_size), k=length), sampler)

    times = run_in_turns(run, (nullcontext, engine_kernels), 1 + _REPEATS)
    prompts, steps = ([spread_of([one[part] for one in runs[1:]]) for runs in times] for part in (0, 1))
    return KernelChange(length, *prompts, *steps)


def _run(runner: Runner, prompt: Sequence[int], sampler: Sampler) -> tuple[float, float]:
    """Seconds of the prompt, and of a step."""
    row = runner.open(prompt, sampler)
    try:
        begin = time.perf_counter()
        for span in spans_of_prompt(runner, row, prompt, chooses=True):
            runner.queue([span]).choices()
        prefilled = time.perf_counter()
        step = runner.queue([Span(row)])
        for _ in range(NUM_STEPS - 1):
            following = runner.queue([Span(row)])
            step.choices()
            step = following
        step.choices()
        return prefilled - begin, (time.perf_counter() - prefilled) / NUM_STEPS
    finally:
        runner.close(row)
