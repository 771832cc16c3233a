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
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda import memory
from llmcli.runners.cuda.dry_run import DryModel
from llmcli.runners.cuda.load import needed_kernels
from llmcli.runners.cuda.memory import plan_memory
from llmcli.runners.cuda.stored import StoredModel

PREFILL = {"embedding", "rms_norm", "rotary", "append_tokens", "attention_prefill"} | {
    *("dequantize", "residual_add", "swiglu")
}
DECODE = {"embedding", "gemv", "attention_decode"}
LOAD = {"repack", "dequantize"}
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
        names = needed(folder, dtype=dtype)
        assert (PREFILL | DECODE | LOAD) - {"rotary"} <= names.keys()
        assert ("head_norm" in names) == ("qwen3" in name)


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
    is_staged = (scheme.group_size or 128) >= 128
    between = {"rms_norm", "round_rows", "scale_bias", "swiglu", "residual_add"}
    assert (DECODE | LOAD | {"rotary", "append_tokens", "attention_prefill"}) <= names.keys()
    assert not between & names.keys()  # gemm_wide is for longer prompts, and no kernel runs between two products
    weight = f"Int{scheme.num_bits}"
    assert any(name.startswith(f"gemv<{weight}, __nv_bfloat16") for name in names["gemv"])
    assert any(name.startswith("gemv<__nv_bfloat16") for name in names["gemv"])  # the head
    assert any("repack_scales" in name for name in names["repack"])
    assert any("repack_zero_points" in name for name in names["repack"]) == (not scheme.is_symmetric)
    assert "gemm_packed" not in names
    others = needed(folder, replace(WITHOUT_WGMMA, shared_bytes_per_block=shared_bytes))
    assert ("gemm_packed" in others) == ((scheme.group_size or 128) >= 64 * 8 // scheme.num_bits)
    assert between <= others.keys()
    assert ("gemm_codes" in names) == ("stage_digits" in names) == is_staged


def test_few_tokens_of_a_chunk_are_known_where_gemm_wide_takes_some_layers(tmp_path: Path) -> None:
    """Their prompts are not in parts, but the end of a chunk may have any number of tokens."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.float32, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 128), skip=("layers.0.",)))
    stored = StoredModel.of_model(open_model(folder), dtype="float32")
    plan = plan_memory(stored, max_seq_len=256, num_rows=1, chunk_tokens=200)
    assert not plan.prompt_ways.can_cut
    names = needed(folder, num_rows=1, dtype="float32")["gemm_narrow"]
    assert {name.split(", ")[3] for name in names} == {"16", "32", "64"}


@pytest.mark.parametrize(
    ("num_rows", "has_codes_head", "tokens"),
    [(8, True, set()), (9, False, {16}), (9, True, {16, 32, 64}), (20, False, {16, 32}), (70, False, {16, 32, 64})],
)
def test_kernels_of_many_rows_are_loaded_before_they_run(
    num_rows: int, has_codes_head: bool, tokens: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each number of lanes that may run, and of tokens that a head of codes may score; on other cards none."""
    monkeypatch.setattr(memory, "stages_rows", lambda card, layout, num_rows: False)  # which need all of them
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    options = ExportOptions(WeightScheme(8, 128), head_bits=8 if has_codes_head else None)
    folder = export(source, tmp_path / "model", options)
    names = needed(folder, num_rows=num_rows)
    assert {int(name.rstrip(">").split(", ")[-1]) for name in names.get("stage_digits", set())} == tokens
    assert {int(name.split(", ")[4]) for name in names.get("gemm_codes", set())} == tokens
    others = needed(folder, WITHOUT_WGMMA, num_rows)
    staged = {"stage_digits", "gemm_codes", "stage_halves", "gemm_halves"}
    packed = {"gemm_packed", "rms_norm", "round_rows", "scale_bias", "swiglu", "residual_add"}
    assert others.keys() - packed == names.keys() - staged - {"stage_wide", "gemm_narrow", "gemm_wide", "add_parts"}
    assert others["gemv"] >= names["gemv"]


def test_kernels_of_staged_prompts_are_loaded_before_they_run(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    names = needed(export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 128))), num_rows=1)
    assert {int(name.split(", ")[4]) for name in names["gemm_codes"]} == {16, 32, 64}
    names = needed(source, num_rows=1)
    assert {int(name.split(", ")[3]) for name in names["gemm_halves"]} == {16, 32, 64, 128}


@pytest.mark.parametrize(
    ("options", "stages_prompts"),
    [
        ({"scheme": WeightScheme(8, 128)}, True),
        ({"scheme": WeightScheme(4, None)}, True),
        ({"scheme": WeightScheme(8, 128), "skip": ("o_proj",)}, True),
        ({"scheme": WeightScheme(8, 64)}, False),
    ],
)
def test_which_models_stage_short_prompts(options: dict[str, Any], stages_prompts: bool, tmp_path: Path) -> None:
    """Other cards do not, nor groups that gemm_codes does not take, nor float32."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    model = open_model(export(source, tmp_path / "model", ExportOptions(**options)))
    for dtype, card, expected in (
        ("auto", TYPICAL_CARD, stages_prompts),
        ("auto", WITHOUT_WGMMA, False),
        ("float32", TYPICAL_CARD, stages_prompts and "skip" not in options),
    ):
        plan = plan_memory(StoredModel.of_model(model, dtype), max_seq_len=4096, num_rows=1, card=card)
        assert plan.prompt_ways.can_stage == expected


def test_layers_stored_in_different_ways(tmp_path: Path) -> None:
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 64), skip=("up_proj", "k_proj")))
    names = needed(folder)
    assert {name.split("<")[1].split(",")[0] for name in names["gemv"]} == {"Int8", "float"}


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
        layers = [one for one, count in launches if count == awq.config.num_hidden_layers]
        steps.append([(one.stem, one.name, one.grid, one.cost and one.cost()) for one in layers])
    assert steps[0] == steps[1]
    assert [stem for stem, *_ in steps[0]] == ["gemv", "attention_decode", "gemv", "gemv", "gemv"]
