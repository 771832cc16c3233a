"""One arithmetic: a row's logits have the same bits among any number of rows, as drafts, and beside prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import EmulatedDevice, HostArray, can_emulate
from tiny_models import CONFIG

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.gemv import GATED_SCALE
from llmcli.lab.cases.gemm import with_model_scales
from llmcli.lab.matrices import aligned_zeros, random_matrix, tiles_of
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.memory import MemoryPlan, plan_memory
from llmcli.runners.cuda.passes import Lanes
from llmcli.runners.cuda.regions import held_bytes, lay_out
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.cuda.weight_layout import Weights, with_widening
from llmcli.runners.cuda.workspace import num_lanes

NUM_ROWS = 65  # more than gemm_narrow multiplies
# Inputs of 1, 2 and 4 chunks: those of o, down, and the rest. The last span of down is not whole.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 48,
}


class EmulatedCard(EmulatedDevice):
    """As a device of a runner."""

    uses_own = False

    def record(self, run: Any, arrays: Any) -> None:
        """Nothing to start again: each layer runs by itself."""
        run()


class EmulatedModel:
    """A random model over host memory, with a page of random keys and values for each row. See `Forward`."""

    def __init__(self, plan: MemoryPlan):
        config, self._plan = plan.stored.config, plan
        self._weights = filled(lay_out(plan.weights, zeros_of(plan.weights)))
        self._cache = lay_out(plan.cache, zeros_of(plan.cache))
        self._workspace = lay_out(plan.workspace, zeros_of(plan.workspace))
        rng = np.random.default_rng(1)
        self._workspace.unit_scale.values[:] = 1
        self._workspace.gated_unit.values[:] = GATED_SCALE
        self._keys = rng.standard_normal(self._cache.keys.shape).astype(np.float16)
        self._token_ids = rng.integers(0, config.vocab_size, plan.num_rows).astype(np.int32)
        self._positions = (np.arange(plan.num_rows) % 12).astype(np.int32)
        self._pages = np.arange(plan.num_rows, dtype=np.int32)[:, None]
        self._forwards: dict[int, Forward] = {}

    def logits(self, device: Any, rows: Sequence[int], num_drafts: int = 0) -> np.ndarray:
        """The logits after the token of each row, all in one step; or of the first row, with drafts after it."""
        count = num_lanes(len(rows))
        lanes = np.array([*rows, *[-1] * (count - len(rows))], np.int32)
        positions = np.where(lanes < 0, 0, self._positions[lanes])
        return self._run(device, lanes, positions.astype(np.int32), None)[: len(rows)]

    def logits_of_drafts(self, device: Any, row: int, count: int) -> np.ndarray:
        """The logits after tokens that follow each other, all in one step."""
        positions = self._positions[row] + np.arange(count, dtype=np.int32)
        return self._run(device, np.full(count, row, np.int32), positions, 1)

    def _run(self, device: Any, lanes: np.ndarray, positions: np.ndarray, num_spans: int | None) -> np.ndarray:
        for cached, start in ((self._cache.keys, self._keys), (self._cache.values, self._keys[::-1])):
            cached.values[...] = start
        if id(device) not in self._forwards:
            products: Any = None
            args = self._plan, self._weights, self._cache, self._workspace, products
            self._forwards[id(device)] = Forward(device, *args)
        forward = self._forwards[id(device)]
        token_ids = np.roll(self._token_ids, -int(lanes[0]))[: len(lanes)] if num_spans else self._token_ids
        given = [HostArray(np.ascontiguousarray(one)) for one in (token_ids, lanes, positions, self._pages)]
        forward.run(Lanes(given[0], None if num_spans else given[1], given[1], given[2], given[3], num_spans))
        count = len(lanes)
        logits = HostArray(aligned_zeros(4 * count * self._plan.stored.config.vocab_size)).view(np.float32)
        logits = logits.reshape(count, -1)
        forward.project_logits(forward.hidden[:count], logits)
        return logits.values.view(np.uint32)


def zeros_of(plan: Any) -> HostArray:
    return HostArray(aligned_zeros(held_bytes(plan)))


def filled(weights: Weights[Any]) -> Weights[Any]:
    """The same with random weights, not far from those of models."""
    rng, stored = np.random.default_rng(0), {}
    for seed, part in enumerate(weights.projections):
        layout = part.layout
        sizes = {"num_rows": layout.num_rows, "num_inputs": layout.num_inputs, "group_size": layout.group_size}
        scheme = {"scale_type": layout.scale_type, "is_symmetric": layout.is_symmetric} if layout.has_scales else {}
        one = random_matrix(seed, layout.weight_type, **sizes, **scheme)  # type: ignore[arg-type]
        one = stored[part.linears] = with_model_scales(one) if layout.has_scales else one
        tiles = tiles_of(one)
        assert tiles.layout == layout
        for name in ("tiles", "scales", "zero_points"):
            if getattr(tiles, name) is not None:
                getattr(part.matrix, name).values[...] = getattr(tiles, name)
    for _, norm in weights.norms:
        norm.values[...] = rng.uniform(0.5, 2, norm.shape)
    table = rng.standard_normal(weights.embed_tokens.shape).astype(np.float32)
    weights.embed_tokens.values[...] = table.view(np.uint32) >> 16
    angles = rng.uniform(0, 6, weights.cos_sin.shape[:2])
    weights.cos_sin.values[...] = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return with_widening(weights, lambda part: (stored[part.linears].widening, stored[part.linears].power))


@pytest.mark.skipif(not can_emulate(), reason="no compiler that can emulate a card")
def test_rows_in_the_emulator(tmp_path: Path) -> None:
    config = LlamaConfig.from_dict({**CONFIG, **SIZES}, "config.json")
    stored = StoredModel.of_config(config, stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    model = EmulatedModel(plan_memory(stored, max_seq_len=16, num_rows=NUM_ROWS))
    card = EmulatedCard(tmp_path)

    def logits_of(device: Any) -> list[np.ndarray]:
        steps = [[0], [64], [7, 64], [*range(8)], [*range(9)], [*range(64)], [*range(NUM_ROWS)]]
        return [*(model.logits(device, rows) for rows in steps), model.logits_of_drafts(device, 7, 3)]

    import time

    t = time.process_time(), time.time()
    card.compile(logits_of)
    print("compiled", time.process_time() - t[0], time.time() - t[1], len(card._functions), sorted(card._functions))
    import resource

    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
    first, last, two, eight, nine, many, all_rows, drafts = logits_of(card)
    print("ran", time.process_time() - t[0], time.time() - t[1])
    assert np.isfinite(all_rows.view(np.float32)).all()
    assert len(np.unique(all_rows, axis=0)) == NUM_ROWS
    for rows, found in (
        ([0], first),
        ([64], last),
        ([7, 64], two),
        (range(8), eight),
        (range(9), nine),
        (range(64), many),
        ([7], drafts[:1]),
    ):
        np.testing.assert_array_equal(found, all_rows[list(rows)])
