"""The CUDA runner on a card that numpy simulates: all of it except the kernels, on machines without a card."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from bits_conformance import BitsConformance
from conformance import RunnerConformance
from families import VARIANTS
from foreign_models import write_awq, write_fp8, write_gptq, write_packed, write_w8a8
from prompt_cuts import CHUNK, CutAtPages
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, PROMPT, logits_of, relative_error, single_steps, start
from safetensors.torch import load_file, save_file
from side_by_side import check_one_arithmetic, check_rows_together, tell
from simulated_card import SimulatedDevice, simulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.formats import LayerSource, StoredLayer, input_order, read_layer
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Arithmetic, Runner, Span
from llmcli.runners.cuda.load.model import load as load_on_card
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.step import products as row_products
from llmcli.runners.torch.load import load


class OnSimulatedCard(BitsConformance):
    """The whole contract is for products in float16, and for those in float32 with a cache of codes."""

    device: SimulatedDevice
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def simulation(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            cls.device = simulate(monkeypatch)
            yield

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load_on_card(
            open_model(folder),
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            prefill_chunk=CHUNK,
            uses_graphs=False,
            device=cls.device,  # type: ignore[arg-type]
            **cls.options,
        )


class TestSimulatedCudaRunner(CutAtPages, OnSimulatedCard):
    """In float32, the model's own type."""


class TestSimulatedCudaRunnerInFloat16(CutAtPages, OnSimulatedCard, RunnerConformance):
    tolerance = 1e-3  # a prompt's inputs are one chunk, those of a lone token are several; sums round to other float16
    options: ClassVar[dict[str, Any]] = {"dtype": "float16"}


class TestSimulatedCudaRunnerWithCodes(CutAtPages, OnSimulatedCard, RunnerConformance):
    tolerance = 2e-4  # a sum in another order may round an element to the next code, which takes 1e-4
    options: ClassVar[dict[str, Any]] = {"kv_cache": "int8"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


def load_simulated(folder: Path, device: SimulatedDevice, **options: Any) -> Runner:
    return load_on_card(open_model(folder), device=device, **{"max_seq_len": 200, "uses_graphs": False, **options})


def worst_error(ours: Runner, reference: Runner) -> float:
    """Over logits of prompts that take each form of products, and of tokens that follow, given by the reference."""
    errors = []
    for length in (1, 2, 8, 9, 64, 100):
        errors.append(relative_error(logits_of(ours, PROMPT[:length]), logits_of(reference, PROMPT[:length])))
    rows = [start(runner, PROMPT[:100], None) for runner in (ours, reference)]
    token_id = PROMPT[100]
    for _ in range(5):
        ours_logits, expected = (
            single_steps(runner, row, [token_id])[0] for runner, row in zip((ours, reference), rows, strict=True)
        )
        errors.append(relative_error(ours_logits, expected))
        token_id = int(expected.argmax())
    return max(errors)


@pytest.mark.parametrize("name", VARIANTS)
def test_families_are_computed_as_by_torch(name: str, device: SimulatedDevice, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    assert worst_error(load_simulated(folder, device), load(open_model(folder), max_seq_len=200)) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_of_codes_is_that_of_torch(name: str, device: SimulatedDevice, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    ours = load_simulated(folder, device, kv_cache="int8")
    assert (ours.cache_type, ours.description) == ("int8", "Simulated Card (cuda:0), float32, KV cache int8")
    assert ours.arithmetic == Arithmetic("auto", "int8", None, ("cupy",))
    assert worst_error(ours, load(open_model(folder), max_seq_len=200, kv_cache="int8")) < 5e-4


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_models_are_computed_as_by_torch(name: str, device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name]))
    runner = load_simulated(folder, device, dtype="float32")  # KV cache and head; inputs of products are float16
    assert worst_error(runner, load(open_model(folder), max_seq_len=200)) < 1e-3


@pytest.mark.parametrize("skipped", ["up_proj", "q_proj", "layers.0.mlp", "down_proj"])
def test_layers_that_are_not_quantized(skipped: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Query, key and value may be stored in different ways, and so may gate and up."""
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(4, 64, is_symmetric=False), skip=(skipped,)))
    assert worst_error(load_simulated(folder, device), load(open_model(folder), max_seq_len=200)) < 1e-3


FOREIGN: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "AWQ": (write_awq, {"group_size": 32}),
    "AWQ, gate and up stored differently": (write_awq, {"keep": "up_proj"}),
    "GPTQ": (write_gptq, {}),
    "GPTQ, asymmetric, 8 bits": (write_gptq, {"sym": False, "bits": 8, "desc_act": None}),
    "GPTQ, whole rows": (write_gptq, {"group_size": -1, "version": 2}),
    "GPTQ, ordered": (write_gptq, {"desc_act": True}),
    "GPTQ, ordered, asymmetric, 8 bits": (write_gptq, {"desc_act": True, "sym": False, "bits": 8}),
    "GPTQ, ordered, every layer by itself": (write_gptq, {"desc_act": True, "shares_order": False}),
    "compressed-tensors, ordered": (write_packed, {"bits": 4, "group_size": 64, "sym": False}),
    "w8a8": (write_w8a8, {}),
    "fp8, blocks": (write_fp8, {}),
    "fp8, one scale": (write_fp8, {"block": None, "suffix": "scale"}),
    "fp8, one scale a row": (write_fp8, {"block": (1, 4096)}),
    "fp8, gate and up stored differently": (write_fp8, {"keep": "up_proj"}),
    "fp8, queries stored differently": (write_fp8, {"keep": "q_proj"}),
}


@pytest.mark.parametrize(("name", "slot_bytes"), [(name, (5000, 2**25)[n % 2]) for n, name in enumerate(FOREIGN)])
def test_foreign_models_are_computed_as_by_torch(
    name: str, slot_bytes: int, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tensors or small pieces; more layers than are kept at a time."""
    monkeypatch.setattr("llmcli.runners.cuda.plan.staging.SLOT_BYTES", slot_bytes)
    write, options = FOREIGN[name]
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, attention_bias=True, **SIZES)
    folder, done = write(source, tmp_path / "foreign", **options), []
    runner = load_simulated(folder, device, dtype="float32", on_progress=lambda *of: done.append(of))
    assert done[-1][0] == done[-1][1]
    assert worst_error(runner, load(open_model(folder), max_seq_len=200)) < 1e-3


def test_a_foreign_layer_is_read_once(device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[str] = []

    def counted(module: str, *rest: Any) -> StoredLayer:
        modules.append(module)
        return read_layer(module, *rest)

    monkeypatch.setattr("llmcli.checkpoint.translation.read_layer", counted)
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    load_simulated(write_awq(source, tmp_path / "awq"), device)
    assert sorted(modules) == sorted(open_model(tmp_path / "awq").tensors.packed)


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (write_fp8, {"block": (64, 32)}, "groups of 32 fp8 weights; a multiple of 128 is needed on CUDA"),
    ],
)
def test_foreign_models_that_no_card_reads(
    write: Callable[..., Path], options: dict[str, Any], message: str, device: SimulatedDevice, tmp_path: Path
) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = write(source, tmp_path / "foreign", **options)
    with pytest.raises(UnsupportedModelError, match=f"{message}.*use --device cpu"):
        load_simulated(folder, device)


@pytest.mark.parametrize(("part", "value"), [("weight", float("nan")), ("weight_scale_inv", float("inf"))])
def test_fp8_that_is_not_finite_is_refused(part: str, value: float, device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = write_fp8(source, tmp_path / "fp8")
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.0.mlp.down_proj.{part}"
    tensors[name].view(-1)[3 if part == "weight" else 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} .*NaN or infinity"):
        load_simulated(folder, device)


def test_an_order_that_only_the_index_tells(device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = write_gptq(source, tmp_path / "foreign", desc_act=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["desc_act"]
    (folder / "config.json").write_text(json.dumps(config))
    assert worst_error(load_simulated(folder, device), load(open_model(folder), max_seq_len=200)) < 1e-3


def test_orders_are_read_once(device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    model = open_model(write_gptq(source, tmp_path / "foreign", desc_act=True))
    read: list[str] = []

    def counted(source: LayerSource, *rest: Any) -> Any:
        read.append(source.module)
        return input_order(source, *rest)

    monkeypatch.setattr("llmcli.checkpoint.formats.input_order", counted)
    assert StoredModel.of_model(model) == StoredModel.of_model(model)
    assert sorted(read) == sorted(model.tensors.packed)


@pytest.mark.parametrize("slot_bytes", [1, 5000])
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_arrive_in_pieces(
    slot_bytes: int, is_tied: bool, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.runners.cuda.plan.staging.SLOT_BYTES", slot_bytes)
    sizes = {**SIZES, "vocab_size": 301, "intermediate_size": 352, "tie_word_embeddings": is_tied}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(4, 32, is_symmetric=False)))
    progress: list[tuple[int, int]] = []
    runner = load_simulated(folder, device, on_progress=lambda done, total: progress.append((done, total)))
    assert worst_error(runner, load(open_model(folder), max_seq_len=200)) < 1e-3
    assert progress == sorted(progress)
    assert len(progress) > 20
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_plain_weights_take_the_type_that_was_asked_for(dtype: str, device: SimulatedDevice, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16)
    runner = load_simulated(folder, device, dtype=dtype)
    cache_type = "float32" if dtype == "float32" else "float16"
    assert runner.description == f"Simulated Card (cuda:0), {dtype}, KV cache {cache_type}"
    error = worst_error(runner, load(open_model(folder), max_seq_len=200))
    assert error < {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}[dtype]
    assert (error > 1e-5) == (dtype != "float32")


def test_a_runner_that_nobody_uses_leaves_the_card_at_once(device: SimulatedDevice, tmp_path: Path) -> None:
    """Not only when Python collects reference cycles: the next model would find no room."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    gc.collect()
    gc.disable()
    try:
        runner = load_simulated(folder, device, num_rows=2)
        tell(runner, PROMPT[:5], GREEDY, 3)
        memory = weakref.ref(runner._device._workspace)  # type: ignore[attr-defined]
        del runner
        assert memory() is None
    finally:
        gc.enable()


# Many rows


@pytest.mark.parametrize("shares_order", [True, False])
def test_many_rows_in_an_order_have_the_bits_of_each_alone(
    shares_order: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """Query, key and value share digits only where they share the order."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = write_gptq(source, tmp_path / "model", desc_act=True, shares_order=shares_order)
    runner = load_simulated(folder, device, num_rows=24, max_seq_len=64)
    check_rows_together(runner, 20, 2)


@pytest.mark.parametrize("name", ["int8 groups of 128", "int4 groups of 128", "int4 channel, asymmetric"])
def test_many_rows_of_codes_have_the_bits_of_each_alone(
    name: str, device: SimulatedDevice, tmp_path: Path, launched: list[tuple[str, int]]
) -> None:
    """With biases, and a value projection of floats among codes; alone a row is multiplied by gemv."""
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    head_bits = None if "asymmetric" in name else 8
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name], head_bits, skip=("v_proj",)))
    check_many_rows(load_simulated(folder, device, num_rows=67, max_seq_len=160), launched)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_rows_of_floats_have_the_bits_of_each_alone(
    dtype: str, device: SimulatedDevice, tmp_path: Path, launched: list[tuple[str, int]]
) -> None:
    sizes = {**SIZES, "attention_bias": True, "num_hidden_layers": 1}
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    check_many_rows(load_simulated(folder, device, dtype=dtype, num_rows=67, max_seq_len=160), launched)


@pytest.mark.parametrize("block", [(128, 128), pytest.param((1, 4096), marks=pytest.mark.long)])
def test_many_rows_of_8_bit_floats_have_the_bits_of_each_alone(
    block: tuple[int, int], device: SimulatedDevice, tmp_path: Path, launched: list[tuple[str, int]]
) -> None:
    sizes = {**SIZES, "attention_bias": True, "num_hidden_layers": 1}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = write_fp8(source, tmp_path / "model", block=block)
    check_many_rows(load_simulated(folder, device, num_rows=67, max_seq_len=160), launched)


@pytest.mark.parametrize("name", ["int8 groups of 128", None])
def test_a_scored_text_has_the_same_bits_by_rows_of_1_and_of_16(
    name: str | None, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head multiplies some rows of it at a time; and the runner may have one row or many."""
    folder = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    if name is not None:
        folder = export(folder, tmp_path / "model", ExportOptions(SCHEMES[name], 8))
    for length in (40, 90):
        scores = set()
        for num_rows, of_head in ((1, 1), (1, 16), (16, 16), (16, 64)):
            monkeypatch.setattr("llmcli.runners.cuda.step.forward.LOGIT_ROWS", of_head)
            runner = load_simulated(folder, device, num_rows=num_rows, max_seq_len=100)
            row = runner.open(PROMPT[:length])
            runner.keep(row, 0)
            scores.add(runner.queue([Span(row, tuple(PROMPT[:length]), "none")]).logits(0).tobytes())
        assert len(scores) == 1


def check_many_rows(runner: Runner, launched: list[tuple[str, int]]) -> None:
    launched.clear()
    check_one_arithmetic(runner, (1, 2, 8, 9, 64, 65))
    assert {("gemv", 1), ("gemv", 2), ("gemm_wide", 16), ("gemm_wide", 64), ("gemm_wide", 72)} <= set(launched)


@pytest.fixture
def launched(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Gets the kernel and the rows of every product of rows."""
    noted: list[tuple[str, int]] = []

    def note(stem: str, operation: Any) -> Any:
        def call(device: Any, **arguments: Any) -> None:
            if isinstance(device, SimulatedDevice):
                noted.append((stem, len(arguments["out"])))
            operation(device, **arguments)

        return call

    for stem in ("gemv", "gemm_wide"):
        monkeypatch.setattr(row_products, stem, note(stem, getattr(row_products, stem)))
    return noted
