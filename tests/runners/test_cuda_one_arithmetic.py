"""One arithmetic: a row's logits have the same bits among any number of rows, next to prompts, and as drafts.

On a card in every format; in the emulator, which runs the same kernels, for as many rows as it can.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import EmulatedDevice, HostArray, can_emulate
from foreign_models import write_fp8
from launched import launched_by
from quantized import export
from side_by_side import check_one_arithmetic
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import GATED_SCALE
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.lab.cases.gemm import with_model_scales
from llmcli.lab.matrices import StoredMatrix, aligned_zeros, random_matrix, tiles_of
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda.plan import workspace
from llmcli.runners.cuda.plan.memory import MemoryPlan, plan_memory
from llmcli.runners.cuda.plan.regions import held_bytes, lay_out
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import Weights, with_widening
from llmcli.runners.cuda.plan.workspace import num_lanes
from llmcli.runners.cuda.step.batch import Batch
from llmcli.runners.cuda.step.forward import Forward

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
# Inputs of one chunk, of two (o) and of four (down).
SIZES = {**HEADS, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
# Chunks of different lengths: qkv and the head have five spans in four chunks, o three in two, down nine in eight.
UNEVEN_SIZES = {**HEADS, "hidden_size": 640, "intermediate_size": 1152, "head_dim": 48}


def write_model(folder: Path, form: str, sizes: dict[str, int]) -> Path:
    """A random model in this format, its head too where that has 8 bits."""
    source = write_tiny_llama(folder / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    if form in ("int8", "int4"):
        return export(source, folder / "model", ExportOptions(WeightScheme(int(form[3:]), 128), 8))
    if form.startswith("fp8"):
        return write_fp8(source, folder / "model", block=(128, 128) if "blocks" in form else (1, 4096))
    return source


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [SIZES, UNEVEN_SIZES], ids=["even", "uneven"])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "fp8 in blocks", "bfloat16", "float16"])
def test_a_row_has_the_same_bits_among_any_others(
    form: str, sizes: dict[str, int], card: Device, load_on_card: Callable[..., Any], tmp_path: Path
) -> None:
    folder, dtype = write_model(tmp_path, form, sizes), "float16" if form == "float16" else "auto"
    runner = load_on_card(folder, dtype=dtype, num_rows=258, max_seq_len=160, uses_graphs=False)
    card.noted = []
    try:
        check_one_arithmetic(runner, (1, 2, 8, 9, 64, 65, 256))
        launched = {stem for stem, _ in launched_by(card)}
    finally:
        card.noted = None
    wide = {"gemm_narrow", "gemm_wide"}
    assert launched & wide == (wide if card.can_wgmma else set())
    assert {"gemv", "stage_wide", "attention_decode", "attention_rows"} <= launched


# In the emulator

FEW_MULTIPROCESSORS = replace(TYPICAL_CARD, num_multiprocessors=3)  # as threads of all blocks take turns on one core


class EmulatedCard(EmulatedDevice):
    """As a device of a runner."""

    uses_own = False

    def record(self, run: Callable[[], None], arrays: Any) -> None:
        """Nothing to start again: each layer runs by itself."""
        run()


class EmulatedModel:
    """A model's computation over host memory, with random weights, and keys and values in a page of each row."""

    def __init__(self, plan: MemoryPlan):
        self._plan = plan
        self._weights = filled(lay_out(plan.weights, zeros_of(plan.weights)))
        self._cache = lay_out(plan.cache, zeros_of(plan.cache))
        self._workspace = lay_out(plan.workspace, zeros_of(plan.workspace))
        self._workspace.unit_scale.values[:] = 1
        self._workspace.gated_unit.values[:] = GATED_SCALE
        rng = np.random.default_rng(1)
        self._cached = rng.standard_normal((2, *self._cache.keys.shape)).astype(np.float16)
        self._token_ids = rng.integers(0, plan.stored.config.vocab_size, plan.num_rows).astype(np.int32)
        self._pages = HostArray(np.arange(plan.num_rows, dtype=np.int32)[:, None])

    def logits(self, device: Any, rows: Sequence[int]) -> np.ndarray:
        """The bits of the logits after a token of each row, all in one step."""
        self._cache.keys.values[...], self._cache.values.values[...] = self._cached
        forward = Forward(device, self._plan, self._weights, self._cache, self._workspace)
        unused = [-1] * (num_lanes(len(rows)) - len(rows))
        of_lanes = np.array([*rows, *unused], np.int32)
        lanes, positions = HostArray(of_lanes), HostArray(np.maximum(of_lanes, 0) % 11)
        forward.run(Batch(HostArray(self._token_ids), lanes, positions, self._pages, len(lanes), by_row=True))
        logits = self._workspace.lane_logits[: len(lanes)]
        forward.project_logits(forward.hidden[: len(lanes)], logits)
        return logits.values[: len(rows)].view(np.uint32).copy()


def zeros_of(plan: Any) -> HostArray:
    return HostArray(aligned_zeros(held_bytes(plan)))


def filled(weights: Weights[Any]) -> Weights[Any]:
    """The same with random weights, not far from those of models."""
    rng = np.random.default_rng(0)
    stored: dict[Any, StoredMatrix] = {}
    for seed, part in enumerate(weights.projections):
        layout = part.layout
        shape = layout.num_rows, layout.num_inputs, layout.group_size
        one = with_model_scales(random_matrix(seed, layout.weight_type, *shape, layout.scale_type or "float32"))
        tiles, stored[part.linears] = tiles_of(one), one
        assert tiles.layout == layout
        part.matrix.tiles.values[...], part.matrix.scales.values[...] = tiles.tiles, tiles.scales
    for _, norm in weights.norms:
        norm.values[...] = rng.uniform(0.5, 2, norm.shape)
    table = rng.standard_normal(weights.embed_tokens.tiles.size // 2).astype(np.float32)
    tiles = (table.view(np.uint32) >> 16).astype(np.uint16)  # as bfloat16, in any order
    weights.embed_tokens.tiles.values[...] = tiles.view(np.uint8).reshape(weights.embed_tokens.tiles.shape)
    angles = rng.uniform(0, 6, weights.cos_sin.shape[:2])
    weights.cos_sin.values[...] = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return with_widening(weights, lambda part: (stored[part.linears].widening, stored[part.linears].power))


@pytest.mark.skipif(not can_emulate(), reason="no compiler that can emulate a card")
def test_a_row_has_the_same_bits_among_others_in_the_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, several, and more than gemv and than gemm_narrow multiply. The same attention serves all."""
    monkeypatch.setattr(workspace, "MANY_LANES", 10**6)
    stored, num_rows = StoredModel.of_model(open_model(write_model(tmp_path, "int8", SIZES))), 65
    plan = plan_memory(stored, max_seq_len=16, num_rows=num_rows, card=FEW_MULTIPROCESSORS)
    layer = plan.weights.layers[0]
    assert [num_chunks(part.layout) for part in (*layer.qkv, layer.o, layer.down)] == [1, 2, 4]
    model, card = EmulatedModel(plan), EmulatedCard(tmp_path)
    card.num_multiprocessors = FEW_MULTIPROCESSORS.num_multiprocessors
    steps: list[list[int]] = [[0], [7, 64], [*range(57, 65)], [*range(9)], [*range(num_rows)]]
    launched: set[str] = set()

    def note(notes: Any) -> None:
        for rows in steps:
            model.logits(notes, rows)
        launched.update(launch.stem for launch in notes.launches)

    card.compile(note)
    products = {"gemv", "stage_wide", "gemm_narrow", "gemm_wide", "add_parts"}
    assert launched == {"embedding", "attention_decode", *products}
    *found, expected = (model.logits(card, rows) for rows in steps)
    assert np.isfinite(expected.view(np.float32)).all()
    assert len(np.unique(expected, axis=0)) == num_rows
    for rows, logits in zip(steps, found, strict=False):
        np.testing.assert_array_equal(logits, expected[rows])
