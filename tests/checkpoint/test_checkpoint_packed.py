"""Folders with quantized layers: what is matched, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.model import Model, open_model
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch.load import load

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A model in int8, groups of 32, with down_proj (176 inputs) in a channel group of its own."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False)
    destination = tmp_path / "packed"
    exporter = Exporter(plan_export(open_model(source), ExportOptions(WeightScheme(8, 32))), destination, "tiny")
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    return destination


@pytest.fixture
def opened(packed: Path) -> Callable[..., Model]:
    """Open the folder after changing tensors (None removes one) and the quantization_config."""

    def call(tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Model:
        held = load_file(packed / "model.safetensors") | (tensors or {})
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, packed / "model.safetensors")
        values = json.loads((packed / "config.json").read_text())
        values["quantization_config"] |= config
        (packed / "config.json").write_text(json.dumps(values))
        return open_model(packed)

    return call


def test_schemes_and_shapes(opened: Callable[..., Model]) -> None:
    model = opened()
    assert len(model.tensors.packed) == 3 * 7
    assert model.tensors.packed[LAYER].scheme == WeightScheme(8, 32)
    assert model.tensors.packed[LAYER].shape == (176, 64)
    assert model.tensors.packed["model.layers.0.mlp.down_proj"].scheme == WeightScheme(8, None)
    assert model.tensors.unused == ()


def test_a_missing_part_is_named(opened: Callable[..., Model]) -> None:
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors are missing: {LAYER}.weight_scale"):
        opened({f"{LAYER}.weight_scale": None})


def test_scales_of_another_group_size_are_explained(opened: Callable[..., Model]) -> None:
    with pytest.raises(CheckpointError, match=r"weight_scale .*is \[176, 1\], expected \[176, 2\] .*groups of 32"):
        opened({f"{LAYER}.weight_scale": torch.ones(176, 1)})


def test_codes_that_are_no_integers(opened: Callable[..., Model]) -> None:
    with pytest.raises(UnsupportedModelError, match="weight_packed in model.safetensors is F32, expected I32"):
        opened({f"{LAYER}.weight_packed": torch.zeros(176, 16)})


def test_a_stored_shape_that_lies(opened: Callable[..., Model]) -> None:
    model = opened({f"{LAYER}.weight_shape": torch.tensor([176, 63])})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_shape is \[176, 63\], expected \[176, 64\]"):
        load(model, max_seq_len=32)


def test_scales_that_are_not_finite(opened: Callable[..., Model]) -> None:
    model = opened({f"{LAYER}.weight_scale": torch.full((176, 2), torch.inf)})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_scale in model.safetensors holds NaN or infinity"):
        load(model, max_seq_len=32)


def test_an_order_that_is_not_declared(opened: Callable[..., Model]) -> None:
    """Groups of neighbours need no order, nor do unset ones; any other contradicts the config."""
    natural = torch.arange(64, dtype=torch.int32) // 32
    for index in (natural, torch.full_like(natural, -1)):
        load(opened({f"{LAYER}.weight_g_idx": index}), max_seq_len=32)
    model = opened({f"{LAYER}.weight_g_idx": natural.flip(0)})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_g_idx in model.safetensors orders the inputs, and"):
        load(model, max_seq_len=32)


def test_a_quantized_embedding_is_refused(opened: Callable[..., Model]) -> None:
    with pytest.raises(UnsupportedModelError, match="a quantized embedding .* is not supported"):
        opened({"model.embed_tokens.weight_packed": torch.zeros(288, 16, dtype=torch.int32)})


def test_groups_that_do_not_divide_a_layer(opened: Callable[..., Model]) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True}}}
    groups["group_0"]["weights"] |= {"strategy": "group", "group_size": 64}
    with pytest.raises(CheckpointError, match="down_proj has 176 inputs, which groups of 64 do not divide"):
        opened(config_groups=groups)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "quip"}, "quip"),
    ],
)
def test_other_features_are_refused_by_name(opened: Callable[..., Model], change: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError, match=feature):
        opened(**change)


def test_a_quantized_cache_is_not_used_and_a_line_says_so(opened: Callable[..., Model]) -> None:
    scales = {f"model.layers.0.self_attn.{side}_scale": torch.ones(1) for side in "qkv"}
    model = opened(scales, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert model.tensors.unused == ()
    assert model.notes == (
        "made for a quantized KV cache; llmcli does not use its scales (--kv-cache int8 needs none)",
    )
    assert opened(kv_cache_scheme=None).notes == ()


def test_zero_points_of_a_symmetric_model(opened: Callable[..., Model]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    with pytest.raises(CheckpointError, match=f"{name} is there, and config.json says that the weights are symmetric"):
        opened({name: torch.zeros(22, 2, dtype=torch.int32)})


def test_activation_quantization_is_refused_by_name(opened: Callable[..., Model], packed: Path) -> None:
    groups = json.loads((packed / "config.json").read_text())["quantization_config"]["config_groups"]
    for group in groups.values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True}
    with pytest.raises(UnsupportedModelError, match="input_activations"):
        opened(config_groups=groups)
