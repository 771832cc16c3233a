"""A dry run over phantoms records what the runner launches on arrays."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import VARIANTS
from quantized import SCHEMES, SIZES, export
from simulated_card import SimulatedDevice, allocate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sample_token import NUM_RESULTS, RowLayout, sample_token
from llmcli.kernels.tiles import fastest_widening
from llmcli.quantization.schemes import ExportOptions
from llmcli.runners.base import Arithmetic, Limits, pages_of
from llmcli.runners.cuda.plan.memory import MemoryPlan, plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import with_widening
from llmcli.runners.cuda.predict.dry_run import DryModel, Started
from llmcli.runners.cuda.step.arena import on_card
from llmcli.runners.cuda.step.device import CudaDevice
from llmcli.runners.cuda.step.forward import Forward
from llmcli.runners.step_device import SINGLE, Work

Noted = tuple[str, str, tuple[int, ...], int]  # stem, name, grid and bytes of shared memory of a launch


class CountingDevice(SimulatedDevice):
    """Records launches and launches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Noted] = []
        self.num_repeated = 0

    def launch(self, stem: str, name: str, *, grid: Any, shared_bytes: int = 0, **launch: Any) -> None:
        self.noted.append((stem, name, grid, shared_bytes))

    def record(self, run: Callable[[], None], arrays: Any) -> Any:
        before = len(self.noted)
        run()
        return SimpleNamespace(start=functools.partial(self.repeat, self.noted[before:]))

    def repeat(self, recorded: list[Noted], addresses: Any) -> None:
        self.noted.extend(recorded)
        self.num_repeated += len(recorded)


class CountingSampler:
    """Launches as `DeviceSampler` does, over an unread state."""

    def __init__(self, device: Any, workspace: Any, vocab_size: int):
        num_rows = len(workspace.slot_token_ids)
        self._device, self._token_ids, self._history = device, workspace.slot_token_ids, workspace.history
        self._state = Phantom((num_rows, RowLayout(vocab_size).row_bytes), np.uint8, 1 << 52)
        self._results = Phantom((num_rows, 2, NUM_RESULTS), np.uint64, 2 << 52)

    def enqueue(self, **arrays: Any) -> None:
        of_rows = {"token_ids": self._token_ids, "history": self._history}
        sample_token(self._device, **arrays, **of_rows, state=self._state, results=self._results)

    def allow(self, slot: int, mask: Any) -> None:
        assert mask is None  # no text here has a schema

    def allow_any(self, slots: Any) -> None: ...

    def count_run(self, slot: int) -> int:
        return 1


def plan_of(folder: Path, *, num_rows: int = 8, **options: Any) -> MemoryPlan:
    stored = StoredModel.of_model(open_model(folder), **options)
    return plan_memory(stored, max_seq_len=256, num_rows=num_rows, chunk_tokens=200)


@pytest.fixture
def count_launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the runner's device launches: one step of a number of rows, or a prompt that fits a chunk."""
    monkeypatch.setattr("llmcli.runners.cuda.step.arena.allocate", allocate)
    monkeypatch.setattr("llmcli.runners.cuda.step.forward.copy", lambda *_: None)

    def count(
        plan: MemoryPlan,
        *,
        num_rows: int = 0,
        num_tokens: int = 0,
        is_last: bool = False,
        shared_bytes: int = 227 * 1024,
    ) -> Any:
        device: Any = CountingDevice()
        device.shared_bytes_per_block = shared_bytes
        workspace, config = on_card(plan.workspace), plan.stored.config
        weights = with_widening(on_card(plan.weights), lambda part: (fastest_widening(part.layout), 0))
        forward = Forward(device, plan, weights, on_card(plan.cache), workspace)
        mailbox: Any = SimpleNamespace(send=lambda target, source: None)
        sampler: Any = CountingSampler(device, workspace, config.vocab_size)
        limits = Limits(plan.num_rows, plan.max_seq_len, plan.num_pages, works_ahead=True)
        card = CudaDevice(
            forward,
            sampler,
            workspace,
            mailbox,
            uses_graphs=False,
            limits=limits,
            cache_type="",
            description="",
            arithmetic=Arithmetic("auto", "auto", None, ()),
        )
        pages = range(pages_of(plan.max_seq_len))
        if num_tokens:
            method = card.method(0, num_tokens)
            works = [Work(None, pages, 20, (1,) * num_tokens, method, "none", logits_from=num_tokens - is_last)]
        else:
            works = [Work(slot, pages, 20, (1,), SINGLE, "last") for slot in range(num_rows)]
        card.run(works)
        return device

    return count


def notes(started: list[Started]) -> Counter[Noted]:
    counted: Counter[Noted] = Counter()
    for one in started:
        launch = one.launch
        counted[launch.stem, launch.name, launch.grid, launch.shared_bytes] += one.count
    return counted


def check_launches(
    plan: MemoryPlan, count_launches: Any, shared_bytes: int = 227 * 1024, row_counts: tuple[int, ...] = (1, 4, 8)
) -> None:
    """A dry run over phantoms records what the runner launches on arrays."""
    model = DryModel(plan, replace(TYPICAL_CARD, shared_bytes_per_block=shared_bytes))
    for num_rows in row_counts:
        launched = count_launches(plan, num_rows=num_rows, shared_bytes=shared_bytes).noted
        assert notes(model.step(num_rows, 20)) == Counter(launched)
    for num_tokens in (1, 2, 8, 9, 64, 65, 200):
        for is_last in (False, True):
            device = count_launches(plan, num_tokens=num_tokens, is_last=is_last, shared_bytes=shared_bytes)
            started = model.span(num_tokens, 20, is_last=is_last)
            assert notes(started) == Counter(device.noted)
            assert len(started) == len(device.noted) - device.num_repeated


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_of_every_family(name: str, count_launches: Any, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **VARIANTS[name])
    for dtype in ("auto", "float16"):
        check_launches(plan_of(folder, dtype=dtype), count_launches)


@pytest.mark.parametrize("name", ["int8 channel", "int8 groups of 32", "int4 groups of 64, asymmetric"])
def test_launches_of_quantized_models(name: str, count_launches: Any, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name], skip=("k_proj",)))
    check_launches(plan_of(folder), count_launches)


def test_launches_of_many_rows(count_launches: Any, tmp_path: Path) -> None:
    """More than a pass, than attention takes at a time, and than the sampler does; some lanes are unused."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    plan = plan_of(folder, num_rows=131)
    check_launches(plan, count_launches, row_counts=(9, 40, 70, 131))
    model = DryModel(plan, TYPICAL_CARD)
    for num_rows, kernel in ((31, "attention_rows"), (24, "attention_decode")):  # 31 rows have 32 lanes
        stems = {one.launch.stem for one in model.step(num_rows, 20)}
        assert {stem for stem in stems if stem.startswith("attention")} == {kernel}


@pytest.mark.parametrize("name", ["int8 groups of 128", "int4 channel", "int4 groups of 64, asymmetric"])
def test_launches_of_many_rows_of_codes(name: str, count_launches: Any, tmp_path: Path) -> None:
    """With a float matrix among query, key and value; an int4 group of 64 is smaller than a unit."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name], skip=("k_proj",)))
    plan = plan_of(folder, num_rows=131)
    check_launches(plan, count_launches, row_counts=(8, 9, 16, 40, 131))
    assert plan.workspace.others is not None


def test_launches_where_shared_memory_is_short(count_launches: Any, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 20480, "num_hidden_layers": 1}
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    plan = plan_of(folder)
    check_launches(plan, count_launches, shared_bytes=99 * 1024)
