"""Rows driven step by step, for tests: run a prompt, continue, read logits."""

from collections.abc import Sequence

import numpy as np
from tiny_models import CONFIG

from llmcli.runners.base import AllLogits, Choose, Logits, Runner, Span
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler, SamplingParams

PROMPT = [int(token_id) for token_id in np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 300)]
GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)
WARM = SamplingParams(temperature=1.0, top_p=1.0)


def run_prompt(runner: Runner, row: int, prompt: Sequence[int], most: int = 10**9, choose: Choose = "last") -> Logits:
    """Run the rest of the row's prompt, and return the logits after it; the last span chooses."""
    while True:
        begin = runner.num_tokens(row)
        end = runner.span_end(row, most)
        assert begin < end <= len(prompt)
        is_last = end == len(prompt)
        step = runner.queue([Span(row, tuple(prompt[begin:end]), choose if is_last else "none")])
        step.choices()
        if is_last:
            return step.logits(0, end - begin - 1)[0]


def start(runner: Runner, prompt: Sequence[int], sampler: Sampler | None = GREEDY, most: int = 10**9) -> int:
    """A row that has run its prompt, and chosen a token if it has a sampler."""
    row = runner.open(prompt, sampler)
    run_prompt(runner, row, prompt, most, "none" if sampler is None else "last")
    return row


def logits_of(runner: Runner, prompt: Sequence[int]) -> Logits:
    """The logits after a prompt, in a row of its own."""
    row = runner.open(prompt)
    logits = run_prompt(runner, row, prompt, choose="none")
    runner.close(row)
    return logits


def single_steps(runner: Runner, row: int, token_ids: Sequence[int]) -> AllLogits:
    """Run tokens one by one."""
    return np.concatenate([runner.queue([Span(row, (token_id,), "none")]).logits(0) for token_id in token_ids])


def one(runner: Runner, span: Span) -> Choice:
    """The choice of a step of one span."""
    (chosen,) = runner.queue([span]).choices()
    assert isinstance(chosen, tuple), chosen
    return chosen[-1]


def go_on(runner: Runner, row: int, count: int) -> list[int]:
    """The next tokens of a row that has chosen one."""
    return [one(runner, Span(row)).token_id for _ in range(count)]


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Bit for bit."""
    return first.tobytes() == second.tobytes()


def relative_error(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max() / np.abs(second).max())


def forget_prompts(runner: Runner) -> None:
    """Use every page, so that no prefix of an earlier prompt is left. No row may be open."""
    limits = runner.limits
    rows = [runner.open(PROMPT[:1]) for _ in range(limits.num_rows)]
    for row in rows:
        assert runner.reserve(row, limits.max_seq_len)
    for row in rows:
        runner.close(row)
