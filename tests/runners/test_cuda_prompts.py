"""Prompts side by side on a card: which share a pass, and that each has its bits of a run alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import write_gptq
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, PROMPT, logits_of, relative_error, same
from side_by_side import check_prompts_together
from simulated_card import SimulatedDevice, simulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.quantization.schemes import ExportOptions
from llmcli.runners.base import Runner, Span
from llmcli.runners.cuda.load.model import load
from llmcli.runners.cuda.step.batch import Batch
from llmcli.runners.cuda.step.forward import Forward
from llmcli.runners.torch.load import load as load_by_torch

LENGTHS = [100, 3, 30, 70, 200, 9, 66, 20, 41, 90, 1, 130]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Gets every chunk that runs, without those of dry runs."""
    noted: list[Batch] = []
    run = Forward.run

    def note(forward: Forward, batch: Batch, needed: Any = None) -> None:
        if batch.slices is not None and isinstance(forward.device, SimulatedDevice):
            noted.append(batch)
        run(forward, batch, needed)

    monkeypatch.setattr(Forward, "run", note)
    return noted


def load_simulated(folder: Path, device: Any, **options: Any) -> Runner:
    return load(open_model(folder), device=device, **{"max_seq_len": 256, "uses_graphs": False, **options})


def parts_of(chunks: list[Batch]) -> list[list[tuple[int, int]]]:
    return [[(part.num_tokens, part.start) for part in chunk.slices or ()] for chunk in chunks]


# Each pair of a kind of weights, a type of the cache and a form of products, though not all three of them.
KINDS = ["bfloat16", "float32", "int8 groups of 32", "int4 channel"]
CASES = [
    pytest.param(name, options, is_wide, marks=[] if place % 2 == (is_wide == bool(options)) else [pytest.mark.long])
    for place, name in enumerate(KINDS)
    for options in ({}, {"kv_cache": "int8"})
    for is_wide in (True, False)
]


@pytest.mark.parametrize(("name", "options", "is_wide"), CASES)
def test_each_has_the_bits_that_it_has_alone(
    name: str, options: dict[str, Any], is_wide: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """Whole prompts, and prompts cut at many places, in chunks that hold some of them; also in every other form."""
    device.can_wgmma = is_wide
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    folder = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=dtype, **SIZES)
    if name in SCHEMES:
        folder = export(folder, tmp_path / "model", ExportOptions(SCHEMES[name]))
    runner = load_simulated(folder, device, num_rows=len(LENGTHS), prefill_chunk=160, **options)
    check_prompts_together(runner, LENGTHS, [10**9])
    check_prompts_together(runner, LENGTHS, [40, 16, 100])


@pytest.mark.cuda
@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("options", [{}, {"kv_cache": "int8"}], ids=str)
def test_each_has_the_bits_that_it_has_alone_on_a_card(
    is_quantized: bool,
    options: dict[str, Any],
    load_on_card: Callable[..., Runner],
    int8_model: Path,
    tmp_path: Path,
) -> None:
    folder = int8_model
    if not is_quantized:
        folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    runner = load_on_card(folder, num_rows=len(LENGTHS), prefill_chunk=256, **options)
    assert runner.limits.joins_prompts
    check_prompts_together(runner, LENGTHS, [10**9])
    check_prompts_together(runner, LENGTHS, [40, 16, 100])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16)


def queue_all(runner: Runner, lengths: list[int]) -> tuple[Any, list[list[int]]]:
    """A step that runs prompts of these lengths, no two with a common beginning."""
    prompts = [[row, *PROMPT[1:length]] for row, length in enumerate(lengths)]
    rows = [runner.open(prompt) for prompt in prompts]
    return runner.queue([Span(row, tuple(prompt), "none") for row, prompt in zip(rows, prompts, strict=True)]), prompts


def test_which_run_in_one_pass(device: SimulatedDevice, tmp_path: Path, chunks: list[Batch]) -> None:
    """Short prompts, more in all than a single one may have; long ones, in a chunk; 8 tokens need no chunk."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    queue_all(load_simulated(folder, device, num_rows=8, prefill_chunk=160), [60, 20, 70, 8, 64, 30, 16, 90])
    assert parts_of(chunks) == [[(60, 0), (20, 0), (64, 0)], [(30, 0), (16, 0)], [(70, 0), (90, 0)]]
    assert [chunk.in_chunks for chunk in chunks] == [True, True, False]
    chunks.clear()
    queue_all(load_simulated(folder, device, num_rows=20, max_seq_len=1536), [50] * 20)
    assert [chunk.num_rows for chunk in chunks] == [5, 5, 5, 5]  # 256 tokens at a time
    chunks.clear()
    queue_all(load_simulated(folder, device, num_rows=20, max_seq_len=1536), [65] * 20)
    assert [chunk.num_rows for chunk in chunks] == [16, 4]


@pytest.mark.parametrize("shares_order", [True, False])
def test_short_prompts_are_computed_as_by_torch(shares_order: bool, device: SimulatedDevice, tmp_path: Path) -> None:
    """With ordered inputs; those of the head have no order."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = write_gptq(source, tmp_path / "model", desc_act=True, shares_order=shares_order)
    reference, runner = load_by_torch(open_model(folder), max_seq_len=256), load_simulated(folder, device)
    for length in (9, 17, 64):
        prompt = PROMPT[:length]
        assert relative_error(logits_of(runner, prompt), logits_of(reference, prompt)) < 1e-3


def test_prompts_of_32_bits_share_passes_too(device: SimulatedDevice, tmp_path: Path, chunks: list[Batch]) -> None:
    folder = write_tiny_llama(tmp_path / "plain", with_tokenizer=False, dtype=torch.float32)
    queue_all(load_simulated(folder, device, num_rows=4), [70, 20, 90, 30])
    assert sorted(parts_of(chunks)) == [[(20, 0), (30, 0)], [(70, 0), (90, 0)]]


def test_logits_of_all_that_ran_in_the_last_pass(device: SimulatedDevice, folder: Path) -> None:
    sizes = {"num_rows": 4, "prefill_chunk": 300, "max_seq_len": 320}
    runner = load_simulated(folder, device, **sizes)
    step, prompts = queue_all(runner, [140, 20, 150])
    found = step.logits(0, 139)[0], step.logits(2, 149)[0], step.logits(2)
    with pytest.raises(ValueError, match="overwritten"):
        step.logits(1)  # those of another pass
    assert found[2].shape == (150, runner.config.vocab_size)
    assert same(found[2][-1], found[1])
    fresh = load_simulated(folder, device, **sizes)
    for logits, prompt in zip(found, (prompts[0], prompts[2]), strict=False):
        assert same(np.asarray(logits), logits_of(fresh, prompt))


def test_a_choice_behind_every_token_beside_other_prompts(device: SimulatedDevice, folder: Path) -> None:
    runner = load_simulated(folder, device, num_rows=4, prefill_chunk=256)
    prompts = [[row, *PROMPT[1:length]] for row, length in enumerate((70, 100, 75, 90))]

    def choices(places: list[int]) -> list[Any]:
        rows = [runner.open(prompts[place], GREEDY) for place in places]
        for row in rows:
            runner.keep(row, 0)
        spans = [
            Span(row, tuple(prompts[place][:64]), "every") if place == 1 else Span(row, tuple(prompts[place]))
            for row, place in zip(rows, places, strict=True)
        ]
        found = runner.queue(spans).choices()
        for row in rows:
            runner.close(row)
        return found

    together = choices([0, 1, 2, 3])
    assert [len(chosen) for chosen in together] == [1, 64, 1, 1]
    assert together == [chosen for place in range(4) for chosen in choices([place])]
