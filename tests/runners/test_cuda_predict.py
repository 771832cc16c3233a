"""Predictions for cards: the launches and bytes they are made of are those of the runner and of the files."""

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
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sample_token import NUM_RESULTS, RowLayout, sample_token
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import Arithmetic, Limits, pages_of
from llmcli.runners.cuda.arena import on_card
from llmcli.runners.cuda.device import CudaDevice
from llmcli.runners.cuda.draft_lanes import DraftLanes
from llmcli.runners.cuda.dry_run import PRODUCT, DryModel, Started
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.lanes import DecodeLanes
from llmcli.runners.cuda.memory import MemoryPlan, plan_memory
from llmcli.runners.cuda.predict import CHUNK_LAUNCHES, CardPredictor
from llmcli.runners.cuda.pricing import LEAST_CLOCKS, Rates
from llmcli.runners.cuda.products import Products
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.step_device import SINGLE, Work

RATES = Rates(1e12, {"float16": 1e14, "bfloat16": 1e14, "float32": 1e13})


Noted = tuple[str, str, tuple[int, ...], int]  # stem, name, grid and bytes of shared memory of a launch


class CountingDevice(SimulatedDevice):
    """Notes launches and launches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Noted] = []
        self.num_repeated = 0

    def launch(self, stem: str, name: str, *, grid: Any, shared_bytes: int = 0, **launch: Any) -> None:
        self.noted.append((stem, name, grid, shared_bytes))

    def matmul(self, **arrays: Any) -> None:
        self.noted.append((PRODUCT, "", (), 0))

    def record(self, run: Callable[[], None], arrays: Any) -> Any:
        before = len(self.noted)
        run()
        return SimpleNamespace(start=functools.partial(self.repeat, self.noted[before:]))

    def repeat(self, recorded: list[Noted], addresses: Any) -> None:
        self.noted.extend(recorded)
        self.num_repeated += len(recorded)


class CountingSampler:
    """Launches as `DeviceSampler` does, over a state that nobody reads."""

    def __init__(self, device: Any, num_rows: int, vocab_size: int):
        self._device = device
        self._state = Phantom((num_rows, RowLayout(vocab_size).row_bytes), np.uint8, 1 << 52)
        self._results = Phantom((num_rows, 2, NUM_RESULTS), np.uint64, 2 << 52)

    def enqueue(self, **arrays: Any) -> None:
        sample_token(self._device, **arrays, state=self._state, results=self._results)

    def allow(self, slot: int, mask: Any) -> None:
        assert mask is None  # no text here is held to a schema

    def allow_any(self, slots: Any) -> None: ...

    def count_run(self, slot: int) -> int:
        return 1


def plan_of(folder: Path, *, num_rows: int = 8, **options: Any) -> MemoryPlan:
    stored = StoredModel.of_model(open_model(folder), **options)
    return plan_memory(stored, max_seq_len=256, num_rows=num_rows, chunk_tokens=200)


@pytest.fixture
def count_launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the runner's device launches: one step of so many rows, or a prompt of so many tokens that fits a chunk."""
    monkeypatch.setattr("llmcli.runners.cuda.arena.allocate", allocate)

    def count(plan: MemoryPlan, *, num_rows: int = 0, num_tokens: int = 0, shared_bytes: int = 227 * 1024) -> Any:
        device: Any = CountingDevice()
        device.shared_bytes_per_block = shared_bytes
        workspace, config = on_card(plan.workspace), plan.stored.config
        products = Products(device, device, workspace.widened)
        forward = Forward(device, plan, on_card(plan.weights), on_card(plan.cache), workspace, products)
        mailbox: Any = SimpleNamespace(send=lambda target, source: None)
        sampler: Any = CountingSampler(device, plan.num_rows, config.vocab_size)
        lanes = DecodeLanes(forward, sampler, workspace, mailbox, uses_graphs=False)
        limits = Limits(plan.num_rows, plan.max_seq_len, plan.num_pages, works_ahead=True)
        card = CudaDevice(
            forward,
            lanes,
            DraftLanes(forward, sampler, workspace, mailbox, uses_graphs=False),
            sampler,
            workspace,
            mailbox,
            limits=limits,
            is_free=True,
            cache_type="",
            description="",
            arithmetic=Arithmetic("auto", "auto", None, ()),
        )
        pages = range(pages_of(plan.max_seq_len))
        if num_tokens:
            works = [Work(None, pages, 20, (1,) * num_tokens, card.method(0, num_tokens), "none")]
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
    """What a dry run over phantoms notes is what the runner launches on arrays."""
    model = DryModel(plan, replace(TYPICAL_CARD, shared_bytes_per_block=shared_bytes))
    for num_rows in row_counts:
        launched = count_launches(plan, num_rows=num_rows, shared_bytes=shared_bytes).noted
        assert notes(model.step(num_rows, 20)) == Counter(launched)
    for num_tokens in (1, 2, 8, 9, 64, 65, 200):
        device = count_launches(plan, num_tokens=num_tokens, shared_bytes=shared_bytes)
        started = model.span(num_tokens, 20)
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
    """More than a pass, than attention takes at a time, and than the sampler does; some lanes are used by nobody."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    check_launches(plan_of(folder, num_rows=131), count_launches, row_counts=(9, 40, 70, 131))


@pytest.mark.parametrize("name", ["int8 groups of 128", "int4 channel", "int4 groups of 64, asymmetric"])
def test_launches_of_many_rows_as_digits(name: str, count_launches: Any, tmp_path: Path) -> None:
    """Of codes with a float matrix among query, key and value; an int4 group of 64 is smaller than a unit."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name], skip=("k_proj",)))
    plan = plan_of(folder, num_rows=131)
    check_launches(plan, count_launches, row_counts=(8, 9, 16, 40, 131))
    assert plan.workspace.staged is not None  # of 16-bit weights, too


def test_launches_where_shared_memory_is_short(count_launches: Any, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 20480, "num_hidden_layers": 1}
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    plan = plan_of(folder)
    check_launches(plan, count_launches, shared_bytes=99 * 1024)


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
    assert reading < fast.decode_seconds(1000) - 160 * LEAST_CLOCKS / TYPICAL_CARD.clock_hertz < 1.15 * reading
    assert fast.decode_seconds(1000) < fast.decode_seconds(1000, 8) < 3 * fast.decode_seconds(1000)
    assert fast.prefill_seconds(100) is None
    assert fast.first_token_seconds(100) is None


def test_a_slower_clock_and_a_step_without_overlap_take_longer() -> None:
    plan = shape_7b()
    slow_clock = replace(TYPICAL_CARD, clock_hertz=TYPICAL_CARD.clock_hertz / 2)
    no_overlap = replace(TYPICAL_CARD, can_cluster=False)
    usual, slow, apart = (
        CardPredictor(plan, Rates(4.5e12, {}), card).decode_seconds(100)
        for card in (TYPICAL_CARD, slow_clock, no_overlap)
    )
    reading = CardPredictor(plan, RATES, TYPICAL_CARD).decode_bytes(100) / 4.5e12
    # Twice the time for all but bytes, and for the clocks that copies under way had hidden: 129 products, 1.6 us.
    assert slow - usual == pytest.approx(usual - reading + 129 * 1.6e-6, rel=0.05)
    assert apart - usual == pytest.approx(129 * 1.6e-6, rel=0.05)


NO_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


@pytest.mark.parametrize("card", [TYPICAL_CARD, NO_WGMMA], ids=["wgmma", "none"])
@pytest.mark.parametrize(("num_rows", "num_lanes", "num_passes"), [(8, 8, 1), (11, 16, 2), (16, 16, 2), (250, 256, 32)])
def test_bytes_of_many_rows(num_rows: int, num_lanes: int, num_passes: int, card: CardFacts) -> None:
    """Weights once for all lanes where tensor cores take them; else eight lanes a pass.

    Of lanes that nobody uses no keys and values are read.
    """
    predictor = CardPredictor(shape_7b(num_rows=256), RATES, card)
    of_embedding, of_token, of_head = 4096 * 2, 32 * 2 * 4096 * 2, 32000 * 4096 * 2 + 4096 * 4
    of_layers = predictor.decode_bytes(0) - of_embedding - of_head
    passes = 1 if card.can_wgmma else num_passes
    expected = passes * (of_layers + of_head) + num_lanes * of_embedding
    assert predictor.decode_bytes(100, num_rows) == expected + num_rows * 100 * of_token


def test_many_rows_take_a_little_less_than_steps_of_eight_without_wgmma() -> None:
    """Attention, embedding and sampler start less often, and attention of many rows keeps the memory busy."""
    predictor = CardPredictor(shape_7b(num_rows=256), RATES, NO_WGMMA)
    eight = predictor.decode_seconds(100, 8)
    for num_rows in (16, 64, 256):
        steps = num_rows / 8
        assert 0.93 * steps * eight < predictor.decode_seconds(100, num_rows) < steps * eight
    assert predictor.decode_seconds(100, 8) < predictor.decode_seconds(100, 9) < predictor.decode_seconds(100, 16)


def test_rows_as_digits_take_far_less_than_steps_of_eight() -> None:
    """And more rows more, as each has its part of the tensor cores."""
    predictor = CardPredictor(shape_7b(num_rows=256), RATES, TYPICAL_CARD)
    eight = predictor.decode_seconds(100, 8)
    times = [predictor.decode_seconds(100, num_rows) for num_rows in (8, 16, 32, 64, 128, 256)]
    assert times == sorted(times)
    assert times[-1] < 0.5 * 32 * eight


def test_widening_codes_takes_a_slower_memory_less_than_that_longer() -> None:
    """On cards whose products cannot do it themselves."""
    other = replace(TYPICAL_CARD, can_wgmma=False)
    plan = shape_7b(card=other)
    rates = [replace(RATES, read_bytes=rate) for rate in (2e12, 1e12)]
    fast, slow = (CardPredictor(plan, each, other).prefill_seconds(65) for each in rates)
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    # Codes with scales are read and fp16 weights written, then those are read at 70 %; and a few activations.
    moved = weights * (1 + 2 / 128 + 2 + 2 / 0.7)
    assert moved / 2e12 < slow - fast < 1.1 * moved / 2e12


@pytest.mark.parametrize("can_wgmma", [True, False])
def test_a_prompts_launches_declare_the_operations_of_the_model(can_wgmma: bool) -> None:
    """Whatever kernels make the products: two operations a token and weight, and what causal attention needs."""
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    card = replace(TYPICAL_CARD, can_wgmma=can_wgmma)
    model = DryModel(shape_7b(card=card), card)
    for num_tokens in (8, 16, 17, 64, 65, 2048):
        flops: Counter[str] = Counter()
        for one in model.span(num_tokens, 100):
            assert one.launch.cost is not None
            flops[one.launch.stem] += one.count * one.launch.cost().flops
        products = {"gemv", "gemm_packed", "gemm_codes", "gemm_narrow", "gemm_wide", PRODUCT} & flops.keys()
        assert sum(flops[stem] for stem in products) == 2 * num_tokens * weights
        assert len(products) == 1
        assert ("gemm_narrow" in products) == (can_wgmma and 8 < num_tokens <= 64)
        assert ("gemm_wide" in products) == (can_wgmma and num_tokens > 64)
        num_seen = sum(position + 1 for position in range(100, 100 + num_tokens))
        attention = sum(count for stem, count in flops.items() if stem.startswith("attention_"))
        assert attention == 32 * 4 * num_seen * 4096


@pytest.mark.parametrize(("num_rows", "num_lanes"), [(3, 3), (11, 16)])
def test_a_steps_launches_declare_the_operations_of_the_model(num_rows: int, num_lanes: int) -> None:
    """Products are made for every lane, attention for those that are used."""
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    flops: Counter[str] = Counter()
    for one in DryModel(shape_7b(num_rows=16), TYPICAL_CARD).step(num_rows, 100):
        assert one.launch.cost is not None
        flops[one.launch.stem] += one.count * one.launch.cost().flops
    assert flops["gemv"] + flops["gemm_codes"] + flops["gemm_halves"] == 2 * num_lanes * weights
    assert (flops["gemm_codes"] > 0) == (num_lanes > 8)
    assert flops["attention_decode"] == 32 * 4 * num_rows * 101 * 4096


@pytest.mark.parametrize("speed_first", [False, True])
@pytest.mark.parametrize("num_key_value_heads", [32, 8])
def test_every_kernel_is_known_before_the_first_step(num_key_value_heads: int, speed_first: bool) -> None:
    """Of many rows, with codes and, for the head, floats; of long prompts, with few tokens a block and with many."""
    model = DryModel(shape_7b(256, num_key_value_heads, speed_first=speed_first), TYPICAL_CARD)
    known = {(one.launch.stem, one.launch.name) for one in model.every_form()}
    steps = [model.step(num_rows, 100) for num_rows in (*range(1, 34), 40, 72, 136, 256)]
    spans = [model.span(num_tokens, 0) for num_tokens in (9, 17, 40, 65, 128, 129, 300, 700, 1000, 2047, 2048)]
    used = {(one.launch.stem, one.launch.name) for started in (*steps, *spans) for one in started}
    assert used <= known
    many = {one.launch.stem for one in model.step(72, 100)}
    assert ("gemm_wide" in many, "gemm_codes" in many) == (speed_first, not speed_first)
    tokens = {(stem, name.split(", ")[3]) for stem, name in used if stem in ("gemm_narrow", "gemm_wide")}
    assert tokens == {("gemm_narrow", one) for one in ("16", "32", "64")} | {("gemm_wide", "128"), ("gemm_wide", "256")}


def test_short_prompts_are_bound_by_the_host_where_it_is_slow() -> None:
    """The card has to wait for a chunk's tokens in any case."""
    plan = shape_7b()
    slow, slower, none, fast = (
        CardPredictor(plan, replace(RATES, launch_seconds=seconds), TYPICAL_CARD) for seconds in (1e-3, 2e-3, 0.0, 1e-6)
    )
    between = slower.prefill_seconds(100) - slow.prefill_seconds(100)
    of_layer = sum(one.count for one in DryModel(plan, TYPICAL_CARD).span(100, 0)) // 32
    assert between == pytest.approx(1e-3 * (CHUNK_LAUNCHES + 31 * of_layer))
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
