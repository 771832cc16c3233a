"""The launches of the CUDA runner as its launchers check them, and the kernels they need, without a card."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VARIANTS
from quantized import SCHEMES, SIZES, export
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import shape_model
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda.load.model import needed_kernels
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.dry_run import DryModel

PREFILL = {"embedding", "append_tokens", "attention_prefill"}
DECODE = {"embedding", "attention_decode"}
LOAD = {"repack"}
WITHOUT_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


def needed(folder: Path, card: CardFacts = TYPICAL_CARD, num_rows: int = 9, **options: Any) -> dict[str, set[str]]:
    """A model's needs on a card for a number of rows."""
    model = open_model(folder)
    stored = StoredModel.of_model(model, **options)
    plan = plan_memory(stored, max_seq_len=256, num_rows=num_rows, chunk_tokens=200, card=card)
    names = needed_kernels(model, plan, card)
    return {stem: set(found) for stem, found in names.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_launchers_take_every_family(name: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **VARIANTS[name])
    for dtype in ("auto", "float16", "float32"):
        names, others = needed(folder, dtype=dtype), needed(folder, WITHOUT_WGMMA, dtype=dtype)
        assert others.keys() >= PREFILL | DECODE | LOAD
        assert ("gemm_mma" in others) == (dtype != "float32")
        assert names.keys() >= (DECODE | LOAD)
        assert ("gemv" in names, "gemv_float" in names) == (dtype != "float32", dtype == "float32")
        assert ({"gemm_narrow", "gemm_wide"} <= names.keys()) == (dtype != "float32")


@pytest.mark.parametrize("name", VARIANTS)
def test_launchers_take_a_cache_of_codes(name: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **VARIANTS[name])
    for dtype in ("auto", "float32"):
        names = needed(folder, dtype=dtype, kv_cache="int8")
        for stem in ("append_tokens", "attention_prefill", "attention_decode"):
            assert {found.split("<")[1].split(",")[0] for found in names[stem]} == {"KvCode"}


@pytest.mark.parametrize("shared_bytes", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("name", [*SCHEMES, "int8 groups of 64, asymmetric"])
def test_launchers_take_every_scheme(name: str, shared_bytes: int, tmp_path: Path) -> None:
    scheme = SCHEMES.get(name) or WeightScheme(8, 64, is_symmetric=False)
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(scheme))
    names = needed(folder, replace(TYPICAL_CARD, shared_bytes_per_block=shared_bytes))
    assert (DECODE | LOAD | {"stage_wide", "append_tokens", "attention_prefill"}) <= names.keys()
    assert not {"rms_norm", "swiglu"} & names.keys()  # no kernel but stage_wide runs between two products
    assert any(name.startswith(f"gemv<Int{scheme.num_bits}, ") for name in names["gemv"])
    assert any(name.startswith("gemv<__nv_bfloat16") for name in names["gemv"])  # the head
    assert any("repack_scales" in name for name in names["repack"])
    assert any("repack_zero_points" in name for name in names["repack"]) == (not scheme.is_symmetric)
    others = needed(folder, replace(WITHOUT_WGMMA, shared_bytes_per_block=shared_bytes))
    wide = {"gemm_narrow", "gemm_wide"}
    assert wide | {"add_parts"} <= names.keys()
    assert names.keys() - wide == others.keys() - {"gemm_mma"}


@pytest.mark.parametrize("skip", ["q_proj", "o_proj", "up_proj", "down_proj", "layers.0."])
def test_launchers_take_matrices_of_32_bits_among_codes(skip: str, tmp_path: Path) -> None:
    """Each product takes what the one before has written."""
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 128), skip=(skip,)))
    for card in (TYPICAL_CARD, WITHOUT_WGMMA):
        assert {"gemv", "gemv_float"} <= needed(folder, card).keys()


def test_layers_stored_in_different_ways(tmp_path: Path) -> None:
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 64), skip=("up_proj", "k_proj")))
    names = needed(folder)
    assert {name.split("<")[1].split(",")[0] for name in names["gemv"]} == {"Int8"}
    assert "gemv_float" in names


def test_a_chunk_has_room_for_more_lanes_than_a_row_for_tokens(tmp_path: Path) -> None:
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False))
    plan = plan_memory(StoredModel.of_model(model), max_seq_len=48, num_rows=200)
    assert plan.chunk_tokens == 200
    assert "attention_prefill" in needed_kernels(model, plan, TYPICAL_CARD)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_layers_of_awq_run_as_those_of_our_own_int4_with_zero_points(num_rows: int) -> None:
    """The same kernels, blocks and bytes; so the same time."""
    awq = StoredModel.of_model(shape_model("Llama-3.1-8B", "awq"))
    own = StoredModel.of_config(awq.config, stored_dtype="float16", scheme=WeightScheme(4, 128, is_symmetric=False))
    steps = []
    for stored in (awq, own):
        plan = plan_memory(stored, max_seq_len=512, num_rows=num_rows, card=TYPICAL_CARD)
        launches = [(one.launch, one.count) for one in DryModel(plan, TYPICAL_CARD).step(num_rows, 128)]
        layers = [one for one, count in launches if count == awq.config.num_hidden_layers - 2]  # but first and last
        steps.append([(one.stem, one.name, one.grid, one.cost and one.cost()) for one in layers])
    assert steps[0] == steps[1]
    assert [stem for stem, *_ in steps[0]] == ["gemv", "attention_decode", "gemv", "gemv", "gemv"]
