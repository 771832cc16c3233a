"""Which kernels multiply the rows of a layer: by their number, the matrices and the card. All take their arrays."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_models import CONFIG

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.notes import Notes
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import qkv_layout
from llmcli.runners.cuda.predict.dry_run import phantoms
from llmcli.runners.cuda.step.activations import Activations
from llmcli.runners.cuda.step.products import Products

# Inputs of 4 chunks, but o has one: its inputs are one span.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 48,
}
NO_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


def launches(
    num_rows: int,
    card: CardFacts = TYPICAL_CARD,
    dtype: str = "bfloat16",
    scheme: WeightScheme | None = None,
    **how: bool,
) -> dict[str, list[Any]]:
    """What a layer launches before attention and after it, and what the head does; `how`: `in_chunks`."""
    config = LlamaConfig.from_dict({**CONFIG, **SIZES}, "config.json")
    stored = StoredModel.of_config(config, stored_dtype=dtype, scheme=scheme)
    plan = plan_memory(stored, max_seq_len=300, num_rows=300, card=card)
    weights, workspace = phantoms(plan.weights, 1), phantoms(plan.workspace, 2)
    notes: Any = Notes(card)
    products = Products(
        notes, Activations(workspace, workspace.hidden[:num_rows], qkv_layout(config).width), 1e-5, **how
    )
    layer, found = weights.layers[0], {}
    products.qkv(layer, layer)
    found["qkv"] = [one.launch for one in notes.take()]
    products.rest(layer, layer)
    found["rest"] = [one.launch for one in notes.take()]
    hidden = workspace.hidden[: min(num_rows, 64)]
    few = Products(notes, Activations(workspace, hidden, qkv_layout(config).width), 1e-5)
    few.head(weights.head, weights.norm, hidden, workspace.score_logits[: len(hidden)])
    found["head"] = [one.launch for one in notes.take()]
    return found


def stems(*arguments: Any, **options: Any) -> list[str]:
    return [one.stem for part in launches(*arguments, **options).values() for one in part]


FORMS: dict[str, dict[str, Any]] = {
    "int8": {"scheme": WeightScheme(8, 128)},
    "int4 with zero points": {"scheme": WeightScheme(4, 32, is_symmetric=False)},
    "bfloat16": {},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("name", FORMS)
def test_few_rows_are_multiplied_by_gemv(name: str) -> None:
    """Attention and the products round what the next one takes; the head's rows may be any."""
    for num_rows in (1, 2, 8):
        assert stems(num_rows, **FORMS[name]) == ["gemv"] * 4 + ["stage_wide", "gemv"]


@pytest.mark.parametrize("name", FORMS)
def test_more_rows_are_multiplied_together(name: str) -> None:
    """The sums of chunks are added by what comes next: stage_wide, or add_parts after the head."""
    for num_rows, kernel in ((9, "gemm_narrow"), (64, "gemm_narrow"), (65, "gemm_wide"), (300, "gemm_wide")):
        for card, one, last in ((TYPICAL_CARD, kernel, "gemm_narrow"), (NO_WGMMA, "gemm_mma", "gemm_mma")):
            pair, head = ["stage_wide", one], ["stage_wide", last, "add_parts"]
            assert stems(num_rows, card, **FORMS[name]) == [*pair, *pair, *pair, one, *head]


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "gemv_float"), ("bfloat16", "gemv")])
def test_matrices_of_other_kinds_go_eight_rows_at_a_time(dtype: str, kernel: str) -> None:
    """Groups of 8 are too small for the tensor cores of many rows."""
    scheme = None if dtype == "float32" else WeightScheme(8, 8)
    for num_rows, times in ((9, 2), (24, 3), (65, 9)):
        found = launches(num_rows, dtype=dtype, scheme=scheme)
        assert [one.stem for one in found["rest"]].count(kernel) == 3 * times
        assert not {"gemm_narrow", "gemm_wide"} & {one.stem for one in found["qkv"] + found["rest"]}


def test_long_prompts_have_one_chunk_and_rows_as_many_as_the_matrix_has() -> None:
    """Whoever multiplies it, by any number of rows."""
    chunks: dict[str, set[int]] = {}
    for num_rows in (1, 2, 9, 64, 65, 300):
        for part, found in launches(num_rows, **FORMS["int8"]).items():
            for number, launch in enumerate(one for one in found if one.stem not in ("stage_wide", "add_parts")):
                shape = launch.arguments[-1]
                count = 1 << shape.chunk_shift if launch.stem == "gemv" else shape.num_parts
                chunks.setdefault(f"{part} {number}", set()).add(count)
    assert chunks == {"qkv 0": {4}, "rest 0": {1}, "rest 1": {1}, "rest 2": {4}, "head 0": {4}}
    for num_rows in (9, 300):
        found = launches(num_rows, **FORMS["int8"], in_chunks=False)
        shapes = [one.arguments[-1] for part in ("qkv", "rest") for one in found[part] if one.stem != "stage_wide"]
        assert [shape.num_parts for shape in shapes] == [1] * 4


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "weight_type", "expected"),
    [
        (64, 128, "int8", 1),  # a chunk has a span at least
        (64, 256, "int8", 2),
        (64, 300, "int8", 2),
        (6144, 4096, "int8", 4),
        (4096, 4096, "int8", 4),
        (4096, 14336, "int8", 4),  # long rows have four at most, unless they are of int4
        (4096, 14336, "int4", 8),
        (2048, 2048, "int8", 8),
        (8192, 4096, "int8", 2),
        (16384, 4096, "int8", 1),
        (24576, 4096, "int4", 2),
    ],
)
def test_chunks_of_a_matrix(num_outputs: int, num_inputs: int, weight_type: str, expected: int) -> None:
    layout = tile_layout(weight_type, num_outputs, num_inputs, 128, "bfloat16")
    assert num_chunks(layout) == expected
    assert num_chunks(layout, is_gated=True) == 1
