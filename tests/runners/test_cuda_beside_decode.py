"""The CUDA runner while steps are queued ahead or interrupted, on a card that numpy simulates."""

import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from row_steps import GREEDY, PROMPT, WARM, go_on, logits_of, one, run_prompt, same, single_steps, start
from side_by_side import check_changing_pages, check_comings_and_goings, check_rows_together, tell, token_of
from simulated_card import SimulatedDevice, SimulatedSampler, simulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import InsufficientMemoryError
from llmcli.runners.base import Runner, Span
from llmcli.runners.cuda.load import model as load_module
from llmcli.runners.cuda.load.model import load
from llmcli.runners.cuda.plan.memory import RESERVED_BYTES
from llmcli.runners.cuda.step import arena
from llmcli.sampling.params import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("beside") / "model", with_tokenizer=False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


def load_simulated(folder: Path, device: SimulatedDevice, **options: Any) -> Runner:
    stand_in: Any = device
    return load(open_model(folder), device=stand_in, **{"max_seq_len": 200, "uses_graphs": False, **options})


@pytest.fixture
def runner(device: SimulatedDevice, folder: Path) -> Runner:
    return load_simulated(folder, device, num_rows=3)


@pytest.fixture
def expected(runner: Runner) -> list[int]:
    """Twelve tokens after 20 of the prompt."""
    return tell(runner, PROMPT[:20], GREEDY, 12)[0]


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def run_other_row(runner: Runner) -> None:
    other = start(runner, PROMPT[:10])
    go_on(runner, other, 2)
    runner.close(other)


def fork(runner: Runner, row: int) -> None:
    copy = runner.fork(row, len(runner.token_ids(row)), Sampler(WARM, seed=1))
    one(runner, Span(copy, (1,)))
    runner.close(copy)


def score(runner: Runner) -> None:
    row = runner.open(PROMPT[:30])
    runner.keep(row, 0)
    runner.queue([Span(row, tuple(PROMPT[:30]), "none")]).logits(0)
    runner.close(row)


OPERATIONS: dict[str, Callable[[Runner, int], object]] = {
    "prompt": lambda runner, row: logits_of(runner, PROMPT[:70]),
    "fork": fork,
    "score": lambda runner, row: score(runner),
    "another row": lambda runner, row: run_other_row(runner),
    "sampler": lambda runner, row: runner.set_sampler(row, GREEDY),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations_change_nothing(name: str, runner: Runner, expected: list[int]) -> None:
    """Each comes while a step of the row is queued and its choice is unread."""
    row = runner.open(PROMPT[:20], GREEDY)
    steps = [runner.queue([Span(row, tuple(PROMPT[runner.num_tokens(row) : 20]))])]
    found = []
    for _ in range(11):
        steps.append(runner.queue([Span(row)]))
        OPERATIONS[name](runner, row)
        found.append(token_of(steps[-2], 0))
        assert list(runner.token_ids(row)) == PROMPT[:20] + found
    assert [*found, token_of(steps[-1], 0)] == expected


def test_a_row_that_is_rolled_back_goes_on_from_there(runner: Runner, expected: list[int]) -> None:
    """Also while a step is queued; its choice is then ignored."""
    row = start(runner, PROMPT[:20])
    go_on(runner, row, 5)
    ahead = runner.queue([Span(row)])
    runner.keep(row, 22)
    again = runner.queue([Span(row, (expected[2],))])
    ahead.choices()
    assert [token_of(again, 0), *go_on(runner, row, 8)] == expected[3:]


@pytest.mark.parametrize("place", ["enqueue", "count_run", "embedding", "attention_decode"])
def test_a_ctrl_c_leaves_the_row_as_it_was(
    place: str, runner: Runner, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while a step is being queued: the step happens as a whole or not at all."""
    row = start(runner, PROMPT[:20])
    given = [expected[0], *go_on(runner, row, 3)]
    owner: Any = SimulatedSampler
    if place == "embedding":
        from llmcli.runners.cuda.step import forward as owner
    if place == "attention_decode":
        from llmcli.runners.cuda.step import attention as owner
    original = getattr(owner, place)

    def strike(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, strike)
        with pytest.raises(KeyboardInterrupt):
            runner.queue([Span(row)])
    assert list(runner.token_ids(row)) == PROMPT[:20] + given[: runner.num_tokens(row) - 20]
    num_held = runner.num_tokens(row) - 20
    assert num_held in (3, 4)
    runner.keep(row, 20 + 3)
    assert [one(runner, Span(row, (given[3],))).token_id, *go_on(runner, row, 7)] == expected[4:]


@pytest.mark.parametrize("place", ["enqueue", "set_sampler"])
def test_an_interrupt_leaves_the_tokens_given_out(
    place: str, runner: Runner, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = start(runner, PROMPT[:20])
    given = [expected[0], *go_on(runner, row, 3)]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedSampler, place, interrupt)
        queue, open_row = lambda: runner.queue([Span(row)]), lambda: runner.open(PROMPT[:30], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            (queue if place == "enqueue" else open_row)()
    assert list(runner.token_ids(row)) == PROMPT[:20] + given[:-1]
    assert [one(runner, Span(row, (given[-1],))).token_id, *go_on(runner, row, 7)] == expected[4:]
    assert len([runner.open(PROMPT[:5], GREEDY) for _ in range(2)]) == 2  # no slot is lost


def test_an_interrupted_prompt_keeps_the_finished_chunks(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_simulated(folder, device, prefill_chunk=32)
    expected = logits_of(runner, PROMPT[:100])
    row = runner.open(PROMPT[:100])
    runner.keep(row, 0)
    runner.queue([Span(row, tuple(PROMPT[:32]), "none")])
    with monkeypatch.context() as patch:
        patch.setattr("llmcli.runners.cuda.step.forward.embedding", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.queue([Span(row, tuple(PROMPT[32:64]), "none")])
    assert list(runner.token_ids(row)) == PROMPT[:32]
    assert same(run_prompt(runner, row, PROMPT[:100], choose="none"), expected)


def test_a_step_that_cannot_be_leaves_every_row_as_it_was(runner: Runner, expected: list[int]) -> None:
    row = start(runner, PROMPT[:20])
    other = start(runner, PROMPT[:10], None)
    with pytest.raises(ValueError, match="names its tokens"):
        runner.queue([Span(row), Span(other, (), "none")])
    assert runner.num_tokens(row) == 20
    assert go_on(runner, row, 11) == expected[1:]
    assert single_steps(runner, other, [1]).shape[0] == 1


def test_more_rows_than_a_pass_serves(device: SimulatedDevice, folder: Path) -> None:
    check_rows_together(load_simulated(folder, device, num_rows=11), 11, 8)


@pytest.mark.parametrize("num_rows", [3, 11])
def test_rows_that_come_and_go_change_no_token(num_rows: int, device: SimulatedDevice, folder: Path) -> None:
    check_comings_and_goings(load_simulated(folder, device, num_rows=num_rows), 3 * num_rows, 8)


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"kv_cache": "int8"}], ids=str)
def test_pages_that_change_in_every_step(options: dict[str, Any], device: SimulatedDevice, folder: Path) -> None:
    check_changing_pages(load_simulated(folder, device, num_rows=6, **options), 40)


def test_less_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    device = simulate(monkeypatch, memory_bytes=RESERVED_BYTES + 100 * 2**20)
    options = {"num_rows": 8, "max_seq_len": 40_000}
    limits = load_simulated(folder, device, allows_less=True, **options).limits
    assert 1 <= limits.num_rows <= 8
    assert min(2, limits.num_rows) * 2500 <= limits.num_pages < 8 * 2500
    with pytest.raises(InsufficientMemoryError, match="is available: use --context"):
        load_simulated(folder, device, **options)


def test_memory_is_free_as_soon_as_the_runner_is_dropped(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, folder: Path
) -> None:
    allocated: list[weakref.ref[Any]] = []

    def card_memory(num_bytes: int) -> Any:
        memory = real_card_memory(num_bytes)
        allocated.append(weakref.ref(memory))
        return memory

    real_card_memory = arena.card_memory
    for module in (arena, load_module):
        monkeypatch.setattr(module, "card_memory", card_memory)
    gc.disable()  # the next model's load does not wait for the collector
    try:
        runner = load_simulated(folder, device)
        tell(runner, PROMPT[:20], GREEDY, 3)
        assert [memory() is None for memory in allocated] == [False] * 3  # weights, cache, workspace
        del runner
        assert [memory() is None for memory in allocated] == [True] * 3
    finally:
        gc.enable()
