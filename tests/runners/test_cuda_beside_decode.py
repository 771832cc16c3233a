"""The CUDA runner while a decode is suspended or interrupted, on a card that numpy simulates."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmcli.runners.cuda.runner import CudaRunner
from row_steps import GREEDY, PROMPT, WARM, decode, prefill, relative_error
from simulated_card import SimulatedDevice, SimulatedSampler, simulate
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import InsufficientMemoryError, UsageError
from llmcli.runners.cuda.load import load
from llmcli.runners.cuda.memory import RESERVED_BYTES
from llmcli.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("beside") / "model", with_tokenizer=False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


def load_simulated(folder: Path, device: SimulatedDevice, **options: Any) -> CudaRunner:
    return load(open_model(folder), device=device, **{"max_seq_len": 200, "uses_graphs": False, **options})


@pytest.fixture
def runner(device: SimulatedDevice, folder: Path) -> CudaRunner:
    return load_simulated(folder, device, num_rows=3)


@pytest.fixture
def expected(runner: CudaRunner) -> list[int]:
    """Twelve tokens of row 0 after 20 of the prompt, which are all that the row holds again."""
    prefill(runner, PROMPT[:20])
    token_ids = decode(runner, 12)
    runner.truncate(0, 20)
    return token_ids


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def decode_other_row(runner: CudaRunner) -> None:
    prefill(runner, PROMPT[:10], row=1)
    decode(runner, 2, row=1)


OPERATIONS: dict[str, Callable[[CudaRunner], object]] = {
    "prefill": lambda runner: prefill(runner, PROMPT[:70], row=1),
    "copy": lambda runner: runner.copy_row(0, 2),
    "score": lambda runner: list(runner.score(1, PROMPT[:30], first=1)),
    "decode": decode_other_row,
    "logits": lambda runner: runner.logits(0),
    "truncate": lambda runner: runner.truncate(1, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations_change_nothing(name: str, runner: CudaRunner, expected: list[int]) -> None:
    steps = runner.decode([0], [GREEDY])
    found = []
    for _ in range(12):
        found += next(steps)
        OPERATIONS[name](runner)
        assert list(runner.token_ids(0)) == PROMPT[:20] + found
    assert found == expected


def test_a_row_that_is_rolled_back_goes_on_from_there(runner: CudaRunner, expected: list[int]) -> None:
    steps = runner.decode([0], [GREEDY])
    first = [next(steps)[0] for _ in range(6)]
    runner.truncate(0, 22)
    assert first[:2] + [next(steps)[0] for _ in range(10)] == expected


def test_logits_belong_to_the_last_token_given_out(runner: CudaRunner, expected: list[int]) -> None:
    steps = runner.decode([0], [GREEDY])
    for token_id in expected[:5]:
        assert next(steps) == [token_id]
    during = runner.logits(0)
    steps.close()
    assert runner.logits(0).tobytes() == during.tobytes()
    runner.truncate(0, 24)
    prefill(runner, PROMPT[:20] + expected[:5])  # the last token runs alone, as it did
    assert runner.logits(0).tobytes() == during.tobytes()


@pytest.mark.parametrize("place", ["wait", "enqueue", "set_samplers"])
def test_an_interrupt_leaves_the_tokens_given_out(
    place: str, runner: CudaRunner, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = runner.decode([0], [GREEDY])
    given = [next(steps)[0] for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedSampler, place, interrupt)
        if place == "set_samplers":
            runner.truncate(1, 0)  # so that the decode must start again
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert list(runner.token_ids(0)) == PROMPT[:20] + given
    assert given + decode(runner, 9) == expected


@pytest.mark.parametrize("place", ["synchronize", "embedding"])
def test_an_interrupted_prefill_keeps_the_finished_chunks(
    place: str, device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_simulated(folder, device, prefill_chunk=30)
    prefill(runner, PROMPT[:100])
    expected = runner.logits(0)
    runner.truncate(0, 10)
    chunks = runner.prefill(0, PROMPT[:100])
    assert [next(chunks) for _ in range(2)] == [0, 30]
    with monkeypatch.context() as patch:
        if place == "synchronize":
            patch.setattr(device, place, interrupt, raising=False)
        else:
            patch.setattr("llmcli.runners.cuda.forward.embedding", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(chunks)
    assert list(runner.token_ids(0)) == PROMPT[:40]
    assert prefill(runner, PROMPT[:100]) == 60
    assert relative_error(runner.logits(0), expected) < 1e-5


def test_a_sampler_that_leaves_no_token(runner: CudaRunner, expected: list[int]) -> None:
    bans = Sampler(WARM, seed=1, logit_bias=dict.fromkeys(range(CONFIG["vocab_size"]), -math.inf))
    prefill(runner, PROMPT[:10], row=1)
    steps = runner.decode([0, 1], [GREEDY, bans])
    with pytest.raises(UsageError):
        next(steps)
    assert (len(runner.token_ids(0)), len(runner.token_ids(1))) == (20, 10)
    assert decode(runner, 12) == expected


def test_more_rows_than_a_batch(device: SimulatedDevice, folder: Path) -> None:
    runner = load_simulated(folder, device, num_rows=11)
    samplers = [Sampler(WARM, seed=3, sample_index=row) for row in range(11)]
    alone = []
    for row, sampler in enumerate(samplers):
        prefill(runner, PROMPT[row : 3 * row + 5])
        alone.append(decode(runner, 8, sampler))
    for row in range(11):
        prefill(runner, PROMPT[row : 3 * row + 5], row)
    steps = runner.decode(range(11), samplers)
    together = [next(steps) for _ in range(8)]
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


def test_fewer_rows_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    device = simulate(monkeypatch, memory_bytes=RESERVED_BYTES + 100 * 2**20)
    options = {"num_rows": 8, "max_seq_len": 40_000}
    assert 1 <= load_simulated(folder, device, allows_fewer_rows=True, **options).num_rows < 8
    with pytest.raises(InsufficientMemoryError, match="is available: use --context"):
        load_simulated(folder, device, **options)
