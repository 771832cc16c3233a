"""Where weights lie on the card, against an independent derivation: the rows of tensors, put together by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dequantize import dequantize_rows
from families import VARIANTS
from quantized import SIZES, export
from safetensors.torch import load_file, save_file
from simulated_card import SimulatedDevice, send, simulate
from simulated_kernels import on_host, weights_of
from test_cuda_simulated import load_simulated, worst_error
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.model import Model, open_model
from llmcli.checkpoint.reader import TensorReader
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError
from llmcli.quantization.rounding import unpack_rows, unpack_zero_points
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.cuda.load.weight_pieces import WeightPieces
from llmcli.runners.cuda.plan import staging as staging_module
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.regions import held_bytes
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import Weights, plan_weights, with_widening
from llmcli.runners.cuda.step.arena import card_memory, on_card
from llmcli.runners.torch.load import load as load_torch

ODD = {"hidden_size": 72, "intermediate_size": 83, "vocab_size": 301, "head_dim": 24, "num_key_value_heads": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


def place(folder: Path, device: Any, **options: Any) -> Weights[Any]:
    """A model's weights on the simulated card, piece by piece. Memory holds rubbish before."""
    model = open_model(folder)
    stored = StoredModel.of_model(model, **options)
    plan = plan_memory(stored, max_seq_len=16, num_rows=1)
    weights, staging = on_card(plan.weights), on_card(plan.staging)
    pieces = list(WeightPieces(device, model, stored, weights, staging))
    assert sum(piece.file_bytes for piece in pieces) == sum(info.num_bytes for info in model.tensors.tensors.values())
    with TensorReader() as reader:
        for piece in pieces:
            assert piece.num_bytes <= min(slot.nbytes for slot in staging.slots)
            on_its_way, arrived = np.full(piece.num_bytes, 0xA5, np.uint8), card_memory(piece.num_bytes)
            piece.read(reader, on_its_way)
            send(device, arrived, on_its_way)
            piece.take(arrived)
    return with_widening(weights, lambda part: ("floats", 0))


def padded(values: np.ndarray, step: int) -> np.ndarray:
    """With zeros up to whole groups of `step` along the first axis."""
    missing = -len(values) % step
    return np.concatenate((values, np.zeros((missing, *values.shape[1:]), values.dtype)))


def one_after_the_other(*parts: np.ndarray) -> np.ndarray:
    """Query, key and value: each from a whole tile of 16 rows on."""
    return np.concatenate([padded(part, 16) for part in parts])


def in_halves(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Gate and up: eight rows of the one, eight of the other."""
    halves = [padded(part, 8).reshape(-1, 8, *part.shape[1:]) for part in (gate, up)]
    return np.stack(halves, axis=1).reshape(-1, *gate.shape[1:])


def weight_of(tensors: dict[str, np.ndarray], module: str, scheme: WeightScheme | None) -> np.ndarray:
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"]
    assert scheme is not None
    num_rows, num_inputs = tensors[f"{module}.weight_shape"].tolist()
    codes = unpack_rows(tensors[f"{module}.weight_packed"], scheme.num_bits, num_inputs)
    zeros = tensors.get(f"{module}.weight_zero_point")
    unpacked = None if zeros is None else unpack_zero_points(zeros, scheme.num_bits, num_rows)
    return dequantize_rows(codes, tensors[f"{module}.weight_scale"], unpacked, scheme)


def check(weights: Weights[Any], folder: Path, scheme: WeightScheme | None = None) -> None:
    """Every matrix, bias and norm of the card against the tensors of a folder."""
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name: value.float().numpy() if value.is_floating_point() else value.numpy() for name, value in stored.items()
    }
    vocab_size = len(tensors["model.embed_tokens.weight"])
    head = "lm_head" if any(name.startswith("lm_head.") for name in tensors) else "model.embed_tokens"
    assert np.array_equal(weights_of(weights.embed_tokens)[:vocab_size], tensors["model.embed_tokens.weight"])
    compare(weights.head, [head], one_after_the_other, tensors, scheme)
    assert (weights.head.matrix is weights.embed_tokens) == (head == "model.embed_tokens")
    assert np.array_equal(on_host(weights.norm), tensors["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        if len(layer.qkv) == 1:
            compare(layer.qkv[0], qkv, one_after_the_other, tensors, scheme)
        else:
            for projection, module in zip(layer.qkv, qkv, strict=True):
                compare(projection, [module], one_after_the_other, tensors, scheme)
        compare(layer.o, [f"{prefix}.self_attn.o_proj"], one_after_the_other, tensors, scheme)
        compare(layer.gate_up, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], in_halves, tensors, scheme)
        compare(layer.down, [f"{prefix}.mlp.down_proj"], one_after_the_other, tensors, scheme)
        norms = {
            "input_layernorm": layer.input_layernorm,
            "post_attention_layernorm": layer.post_attention_layernorm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
        }
        for name, norm in norms.items():
            expected = tensors.get(f"{prefix}.{name}.weight")
            assert (norm is None) == (expected is None)
            assert expected is None or np.array_equal(on_host(norm), expected)


def compare(
    projection: Any,
    modules: list[str],
    join: Callable[..., np.ndarray],
    tensors: dict[str, np.ndarray],
    scheme: WeightScheme | None,
) -> None:
    expected = padded(join(*(weight_of(tensors, module, scheme) for module in modules)), 16)
    assert np.array_equal(weights_of(projection.matrix), expected)
    biases = [tensors.get(f"{module}.bias") for module in modules]
    assert (projection.bias is None) == (biases[0] is None)
    if projection.bias is not None:
        assert np.array_equal(on_host(projection.bias), padded(join(*biases), 16))


@pytest.mark.parametrize("slot_bytes", [1, 3000, 2**25])
@pytest.mark.parametrize(
    "name", ["one layer, odd sizes", "biases", "qwen2", "qwen3", "qwen3 with layer types", "tied", "odd sizes, biases"]
)
def test_weights_are_where_a_hand_puts_them(
    name: str, slot_bytes: int, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "SLOT_BYTES", slot_bytes)
    sizes = VARIANTS.get(name, {**ODD, **BIASES})
    for dtype in (torch.float32, torch.bfloat16):
        folder = write_tiny_llama(tmp_path / str(dtype), with_tokenizer=False, dtype=dtype, **sizes)
        check(place(folder, device), folder)


@pytest.mark.parametrize("slot_bytes", [1, 20_000])
@pytest.mark.parametrize("skipped", ["k_proj", "up_proj", "gate_proj", "down_proj", "layers.1."])
@pytest.mark.parametrize(
    "scheme", [WeightScheme(4, 64, is_symmetric=False), WeightScheme(8, None), WeightScheme(8, 32, is_symmetric=False)]
)
def test_quantized_weights_beside_others(
    scheme: WeightScheme,
    skipped: str,
    slot_bytes: int,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gate and up that are stored in different ways become float32, exactly."""
    monkeypatch.setattr(staging_module, "SLOT_BYTES", slot_bytes)
    sizes = {**SIZES, **BIASES, "intermediate_size": 320, "num_hidden_layers": 2}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(scheme, skip=(skipped,)))
    weights = place(folder, device)
    is_mixed = skipped in ("up_proj", "gate_proj")
    assert weights.layers[0].gate_up.layout.weight_type == ("float32" if is_mixed else f"int{scheme.num_bits}")
    assert len(weights.layers[0].qkv) == (3 if skipped == "k_proj" else 1)
    check(weights, folder, scheme)


@pytest.mark.parametrize(
    ("slot_bytes", "biases", "expected"),
    [
        (1, {}, 16 * 192 * 2),  # a tile of o_proj's rows
        (10_000, {}, 4 * 16 * 72 * 2),  # four tiles of the embedding's rows, or of q_proj's
        (2**25, {}, 301 * 72 * 2),  # the whole embedding
        (10_000, BIASES, 7 * 512 + 3 * (1024 + 512 + 768 + 512)),  # norms and biases, all of them
    ],
)
def test_a_slot_has_room_for_the_largest_piece(
    slot_bytes: int, biases: dict[str, bool], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles of rows, as many as fit `SLOT_BYTES` but at least one; or the small tensors, which go together."""
    monkeypatch.setattr(staging_module, "SLOT_BYTES", slot_bytes)
    config = LlamaConfig.from_dict({**CONFIG, **ODD, **biases}, "config.json")
    plan = plan_memory(StoredModel.of_config(config, stored_dtype="bfloat16"), max_seq_len=16, num_rows=1)
    assert {slot.shape for slot in plan.staging.slots} == {(expected,)}


def test_regions_of_the_plan_add_up() -> None:
    """Two bytes a weight, four a norm and a bias, every matrix in whole tiles and spans of 128 inputs."""
    config = LlamaConfig.from_dict({**CONFIG, **ODD, **BIASES, "num_hidden_layers": 1}, "config.json")
    plan = plan_weights(StoredModel.of_config(config, stored_dtype="bfloat16"), max_seq_len=10)
    heads = 8 * 24
    rows_of_qkv = heads + 32 + 32  # 24 of keys and of values, each in whole tiles

    def tiled(num_rows: int, num_inputs: int) -> int:
        return -(-num_rows // 16) * 16 * -(-num_inputs // 128) * 256

    sizes = [
        tiled(301, 72),  # embedding
        *(72 * 4,) * 3,  # norms
        *(tiled(rows_of_qkv, 72), rows_of_qkv * 4),
        *(tiled(72, heads), 80 * 4),
        *(tiled(2 * 88, 72), 2 * 88 * 4),
        *(tiled(72, 83), 80 * 4),
        tiled(301, 72),
        10 * 12 * 2 * 4,  # cosine and sine
    ]
    assert held_bytes(plan) == sum(-(-size // 256) * 256 for size in sizes)


# Biases by the tensors.


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return folder


def test_a_config_that_asks_for_biases_of_tensors_that_have_none(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, attention_bias=True)
    with_tensors(folder, lambda tensors: {name: one for name, one in tensors.items() if not name.endswith(".bias")})
    with pytest.raises(CheckpointError, match="12 of 42 tensors are missing: .*q_proj.bias"):
        open_model(folder)


def test_tensors_with_biases_that_the_config_does_not_ask_for(device: SimulatedDevice, tmp_path: Path) -> None:
    """They are ignored: they take no memory and change nothing."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, attention_bias=True)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"attention_bias": true', '"attention_bias": false'))
    model = open_model(folder)
    assert len(model.tensors.unused) == 12
    plan = plan_weights(StoredModel.of_model(model), max_seq_len=16)
    assert all(projection.bias is None for projection in plan.projections)
    ours, reference = load_simulated(folder, device), load_torch(model, max_seq_len=200)
    assert worst_error(ours, reference) < 1e-5


def test_the_tensors_say_what_has_a_bias(tmp_path: Path) -> None:
    """Neither config nor name decides: one of two layers may have it."""
    stored = StoredModel.of_model(written(tmp_path, num_hidden_layers=2, attention_bias=True))
    kept = {name: dtype for name, dtype in stored.dtypes.items() if not name.startswith("model.layers.0.")}
    weights = {name: dtype for name, dtype in stored.dtypes.items() if not name.endswith(".bias")}
    first, second = plan_weights(replace(stored, dtypes={**weights, **kept}), max_seq_len=16).layers
    assert [projection.bias is not None for projection in first.projections] == [False] * 4
    assert [projection.bias is not None for projection in second.projections] == [True, True, False, False]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("scheme", [None, WeightScheme(8, 8)])
def test_a_shape_has_the_tensors_of_a_model(name: str, scheme: WeightScheme | None, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **VARIANTS[name])
    folder = source if scheme is None else export(source, tmp_path / "model", ExportOptions(scheme))
    model = open_model(folder)
    imagined = StoredModel.of_config(model.config, stored_dtype="float32", scheme=scheme)
    assert imagined.dtypes == StoredModel.of_model(model).dtypes


# Refusals while weights are loaded.


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.2.mlp.up_proj.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(
    name: str, value: float, device: SimulatedDevice, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16, attention_bias=True)
    with_tensors(folder, lambda tensors: {**tensors, name: spoiled(tensors[name], value)})
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
        load_simulated(folder, device)


def test_scales_that_are_not_finite_beside_a_float_layer(device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 64), skip=("up_proj",)))
    name = "model.layers.1.mlp.gate_proj.weight_scale"
    with_tensors(folder, lambda tensors: {**tensors, name: spoiled(tensors[name], float("nan"))})
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
        load_simulated(folder, device)


def test_a_shape_that_is_not_the_layers_is_refused(device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(8, 64)))
    name = "model.layers.1.mlp.down_proj.weight_shape"
    with_tensors(folder, lambda tensors: {**tensors, name: tensors[name] + 1})
    with pytest.raises(CheckpointError, match=rf"{name} is \[257, 385\], expected \[256, 384\]; damaged export\?"):
        load_simulated(folder, device)


def spoiled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[-3] = value
    return tensor


def written(folder: Path, **overrides: Any) -> Model:
    return open_model(write_tiny_llama(folder / "model", with_tokenizer=False, **overrides))
