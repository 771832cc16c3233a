"""Predictions for cards: their bytes and operations are those of the files and of the model."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VARIANTS
from quantized import SCHEMES, SIZES, export
from test_cuda_dry_run_launches import plan_of
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda.plan.memory import MemoryPlan, plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.dry_run import DryModel
from llmcli.runners.cuda.predict.predictor import BEFORE_HOPPER, CHUNK_LAUNCHES, HOPPER, CardPredictor, Rates

RATES = Rates(1e12, {"float16": 1e14, "bfloat16": 1e14, "float32": 1e13})


@pytest.mark.parametrize("name", ["int8 groups of 32", "int8 groups of 128", "int4 groups of 64", "int4 channel"])
def test_decode_reads_the_bytes_of_the_files(name: str, tmp_path: Path) -> None:
    """Whole tiles and units, so nothing is padded; of the embedding a row, norms as float32."""
    sizes = {**SIZES, "intermediate_size": 512, "num_attention_heads": 4}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name]))
    infos = open_model(folder).checkpoint.tensors
    expected = 0
    for tensor, info in infos.items():
        if tensor == EMBEDDING:
            expected += info.num_bytes // info.shape[0]
        elif tensor.endswith("norm.weight"):
            expected += 4 * info.shape[0]
        elif not tensor.endswith("_shape"):
            expected += info.num_bytes
    predictor = CardPredictor(plan_of(folder), RATES, TYPICAL_CARD)
    assert predictor.decode_bytes(0) == expected
    per_token = 2 * 3 * 2 * 64 * 2  # keys and values, layers, heads, head_dim, bfloat16
    assert predictor.decode_bytes(100) == expected + 100 * per_token
    assert predictor.decode_bytes(100, 8) == expected + 8 * 100 * per_token + 7 * SIZES["hidden_size"] * 2


def test_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS["qwen2 with windows"])
    predictor = CardPredictor(plan_of(folder), RATES, TYPICAL_CARD)
    per_layer_and_token = 2 * 2 * 8 * 4
    # A window of 16 shows the token itself and 15 others; the first layer has none.
    assert predictor.decode_bytes(16) - predictor.decode_bytes(0) == (16 + 2 * 15) * per_layer_and_token
    assert predictor.decode_bytes(116) - predictor.decode_bytes(16) == 100 * per_layer_and_token  # of the first layer


def shape_7b(num_rows: int = 8, num_key_value_heads: int = 32, **options: Any) -> MemoryPlan:
    config = LlamaConfig.from_dict(
        {
            **CONFIG,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": num_key_value_heads,
            "max_position_embeddings": 8192,
        },
        "config",
    )
    stored = StoredModel.of_config(config, stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    return plan_memory(stored, max_seq_len=8192, num_rows=num_rows, **options)


def test_decode_takes_bytes_by_bandwidth_and_a_little_for_each_kernel() -> None:
    plan = shape_7b()
    fast, slow = (CardPredictor(plan, Rates(rate, {}), TYPICAL_CARD) for rate in (2e12, 1e12))
    reading = fast.decode_bytes(1000) / 2e12
    assert slow.decode_seconds(1000) - fast.decode_seconds(1000) == pytest.approx(reading, rel=0.1)
    starts = 1e-6 * (129 * HOPPER["gemv"].microseconds + 32 * HOPPER["attention_decode"].microseconds)
    assert reading < fast.decode_seconds(1000) - starts < 1.15 * reading
    assert fast.decode_seconds(1000) < fast.decode_seconds(1000, 8) < 3 * fast.decode_seconds(1000)
    assert fast.prefill_seconds(100) is None
    assert fast.first_token_seconds(100) is None


def test_a_step_without_overlap_takes_longer() -> None:
    """129 products wait for the kernel before them."""
    plan = shape_7b()
    usual, apart = (
        CardPredictor(plan, Rates(4.5e12, {}), card).decode_seconds(100) for card in (TYPICAL_CARD, NO_WGMMA)
    )
    wait = 1e-6 * (BEFORE_HOPPER["gemv"].microseconds - HOPPER["gemv"].microseconds)
    assert apart - usual == pytest.approx(129 * wait, rel=0.05)


NO_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


@pytest.mark.parametrize("card", [TYPICAL_CARD, NO_WGMMA], ids=["wgmma", "none"])
@pytest.mark.parametrize(("num_rows", "num_lanes"), [(8, 8), (11, 16), (16, 16), (250, 256)])
def test_bytes_of_many_rows(num_rows: int, num_lanes: int, card: CardFacts) -> None:
    """Weights once for all lanes. No keys and values are read for unused lanes."""
    predictor = CardPredictor(shape_7b(num_rows=256), RATES, card)
    of_embedding, of_token, of_head = 4096 * 2, 32 * 2 * 4096 * 2, 32000 * 4096 * 2 + 4096 * 4
    of_layers = predictor.decode_bytes(0) - of_embedding - of_head
    expected = of_layers + of_head + num_lanes * of_embedding
    assert predictor.decode_bytes(100, num_rows) == expected + num_rows * 100 * of_token


@pytest.mark.parametrize("card", [TYPICAL_CARD, NO_WGMMA], ids=["wgmma", "none"])
def test_many_rows_take_far_less_than_steps_of_eight(card: CardFacts) -> None:
    """And more for more rows, as each adds its part of the tensor cores' time."""
    predictor = CardPredictor(shape_7b(num_rows=256), Rates(4.5e12, {"float16": 7.2e14}), card)
    eight = predictor.decode_seconds(100, 8)
    times = [predictor.decode_seconds(100, num_rows) for num_rows in (8, 16, 32, 64, 128, 256)]
    assert times == sorted(times)
    assert times[-1] < 0.5 * 32 * eight


@pytest.mark.parametrize("can_wgmma", [True, False])
def test_a_prompts_launches_declare_the_operations_of_the_model(can_wgmma: bool) -> None:
    """For any kernels of the products: two operations a token and weight, and what causal attention needs."""
    qkv, rest = 3 * 4096 * 4096, 4096 * 4096 + 3 * 4096 * 11008
    card = replace(TYPICAL_CARD, can_wgmma=can_wgmma)
    model = DryModel(shape_7b(card=card), card)
    lengths = (8, True), (16, True), (17, False), (64, True), (65, True), (2048, True), (2048, False)
    for num_tokens, is_last in lengths:
        # With many tokens the last layer computes keys and values, and all else only for the prompt's last token.
        alone = num_tokens > 64
        flops: Counter[str] = Counter()
        for one in model.span(num_tokens, 100, is_last=is_last):
            assert one.launch.cost is not None
            flops[one.launch.stem] += one.count * one.launch.cost().flops
        products = {"gemv", "gemm_narrow", "gemm_wide", "gemm_mma"} & flops.keys()
        made = num_tokens * (32 * qkv + 31 * rest) + (is_last if alone else num_tokens) * rest
        assert sum(flops[stem] for stem in products) == 2 * made
        assert len(products) == 1 + (can_wgmma and alone and is_last)
        assert ("gemm_narrow" in products) == (can_wgmma and num_tokens > 8 and (num_tokens <= 64 or is_last))
        assert ("gemm_wide" in products) == (can_wgmma and num_tokens > 64)
        assert ("gemm_mma" in products) == (not can_wgmma and num_tokens > 8)
        num_seen = sum(position + 1 for position in range(100, 100 + num_tokens))
        attention = sum(count for stem, count in flops.items() if stem.startswith("attention_"))
        seen_last = is_last * (100 + num_tokens) if alone else num_seen
        assert attention == 4 * (31 * num_seen + seen_last) * 4096


@pytest.mark.parametrize(("num_rows", "num_lanes"), [(3, 3), (11, 16)])
def test_a_steps_launches_declare_the_operations_of_the_model(num_rows: int, num_lanes: int) -> None:
    """Products are made for every lane, attention for those that are used."""
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    flops: Counter[str] = Counter()
    for one in DryModel(shape_7b(num_rows=16), TYPICAL_CARD).step(num_rows, 100):
        assert one.launch.cost is not None
        flops[one.launch.stem] += one.count * one.launch.cost().flops
    assert flops["gemv"] + flops["gemm_narrow"] == 2 * num_lanes * weights
    assert (flops["gemm_narrow"] > 0) == (num_lanes > 8)
    assert flops["attention_decode"] == 32 * 4 * num_rows * 101 * 4096


@pytest.mark.parametrize("num_key_value_heads", [32, 8])
def test_every_kernel_is_known_before_the_first_step(num_key_value_heads: int) -> None:
    """For many rows, with codes and, for the head, floats; for long prompts, with few tokens a block and with many."""
    model = DryModel(shape_7b(256, num_key_value_heads), TYPICAL_CARD)
    known = {(one.launch.stem, one.launch.name) for one in model.every_form()}
    steps = [model.step(num_rows, 100) for num_rows in (*range(1, 34), 40, 72, 136, 256)]
    spans = [model.span(num, 0, is_last=True) for num in (9, 17, 40, 65, 128, 129, 300, 700, 1000, 2047, 2048)]
    used = {(one.launch.stem, one.launch.name) for started in (*steps, *spans) for one in started}
    assert used <= known
    for num_rows, kernel in ((16, "gemm_narrow"), (64, "gemm_narrow"), (72, "gemm_wide")):
        many = {one.launch.stem for one in model.step(num_rows, 100)}
        assert kernel in many
    tokens = {(stem, name.split(", ")[3]) for stem, name in used if stem in ("gemm_narrow", "gemm_wide")}
    assert tokens == {("gemm_narrow", one) for one in ("16", "32", "64")} | {("gemm_wide", "128"), ("gemm_wide", "256")}


def test_short_prompts_are_bound_by_the_host_where_it_is_slow() -> None:
    """The card has to wait for a chunk's tokens in any case."""
    plan = shape_7b()
    slow, slower, none, fast = (
        CardPredictor(plan, replace(RATES, launch_seconds=seconds), TYPICAL_CARD) for seconds in (1e-3, 2e-3, 0.0, 1e-6)
    )
    between = slower.prefill_seconds(100) - slow.prefill_seconds(100)
    # The first layer and the last one have launches of their own.
    of_layer = sum(one.count == 30 for one in DryModel(plan, TYPICAL_CARD).span(100, 0, is_last=True))
    assert between == pytest.approx(1e-3 * (CHUNK_LAUNCHES + 29 * of_layer))
    assert slow.decode_seconds(100) == slower.decode_seconds(100)
    assert fast.prefill_seconds(100) - none.prefill_seconds(100) == pytest.approx(1e-6 * CHUNK_LAUNCHES)


def test_long_prompts_are_bound_by_operations() -> None:
    predictor = CardPredictor(shape_7b(), RATES, TYPICAL_CARD)
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    least = 2 * weights * 2048 / 1e14
    assert least < predictor.prefill_seconds(2048) < 1.5 * least
    # The second chunk has the same products and more to attend to.
    first, both = predictor.prefill_seconds(2048), predictor.prefill_seconds(4096)
    attention = 4 * 2048 * 2048 * 4096 * 32 / 1e14
    assert 2 * first + attention < both < 2 * first + 4 * attention
    assert predictor.first_token_seconds(2048) > predictor.prefill_seconds(2048)


def test_prefill_time_grows_with_the_prompt() -> None:
    predictor = CardPredictor(shape_7b(), RATES, TYPICAL_CARD)
    times = [predictor.prefill_seconds(count) for count in (1, 8, 64, 512, 2048, 2049, 4000, 8000)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(predictor.decode_seconds(1), rel=0.01)
