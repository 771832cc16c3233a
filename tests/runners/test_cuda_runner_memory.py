"""The CUDA runner's use of a card's memory: nothing after its load, and nothing once it is gone."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from row_steps import GREEDY, PROMPT, WARM, go_on, start

from llmcli.errors import InsufficientMemoryError
from llmcli.runners.base import Span
from llmcli.sampling.params import Sampler

pytestmark = [pytest.mark.cuda, pytest.mark.whole_card]


def used_bytes() -> int:
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def test_nothing_is_allocated_after_load(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    import cupy

    runner = load_on_card(int8_model, num_rows=12)

    def work() -> None:
        rows = [start(runner, PROMPT[number : number + 300], GREEDY) for number in range(11)]
        for number in (1, 2, 11):
            for _ in range(20):
                runner.queue([Span(row) for row in rows[:number]]).choices()
        scored = runner.open(PROMPT[:200])
        runner.keep(scored, 0)
        runner.queue([Span(scored, tuple(PROMPT[:200]), "none")]).logits(0)
        forks = [runner.fork(scored, 193), runner.fork(scored, 200)]  # the first copies a page
        for fork in forks:
            runner.queue([Span(fork, tuple(PROMPT[:5]), "none")]).logits(0)
        runner.set_sampler(rows[0], Sampler(WARM, seed=1, logit_bias=dict.fromkeys(range(50), 1.0)))
        runner.queue([Span(rows[0], tuple(PROMPT[:8]), "every")]).choices()
        for row in (*rows, scored, *forks):
            runner.close(row)

    work()  # graphs are made by the first step with this many lanes
    pool = cupy.get_default_memory_pool()
    before = used_bytes(), pool.total_bytes()
    work()
    assert (used_bytes(), pool.total_bytes()) == before


def test_everything_is_freed_with_the_runner(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    def use() -> None:
        runner = load_on_card(int8_model, max_seq_len=100_000)
        go_on(runner, start(runner, PROMPT[:100]), 5)

    use()
    before = used_bytes()
    use()
    assert used_bytes() == before


def test_a_load_that_fails_leaves_nothing(
    load_on_card: Callable[..., Any], int8_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_on_card(int8_model)
    before = used_bytes()
    with pytest.raises(InsufficientMemoryError, match="use --context"):
        load_on_card(int8_model, max_seq_len=2**33)
    # The plan can be wrong about what is free.
    monkeypatch.setattr("llmcli.runners.cuda.load.model.free_bytes", lambda: 2**60)
    with pytest.raises(InsufficientMemoryError, match="the card's memory is full"):
        load_on_card(int8_model, max_seq_len=2**31)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmcli.runners.cuda.load.model.DeviceSampler", fail)
    with pytest.raises(KeyboardInterrupt):
        load_on_card(int8_model)
    assert used_bytes() <= before
