"""Adapters that are damaged, contradict themselves or belong to another model: one line each, nothing is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import layer_shapes, write_lora
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.adapter import open_adapter
from llmcli.checkpoint.adapter_merge import merge_adapters
from llmcli.checkpoint.folder import open_checkpoint
from llmcli.checkpoint.model import Model, open_model
from llmcli.checkpoint.reader import TensorReader
from llmcli.errors import CheckpointError, UnsupportedModelError

SHAPES = layer_shapes(2, 64, 176)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    return write_tiny_llama(folder, dtype=torch.bfloat16, num_hidden_layers=2, with_tokenizer=False)


def merged(base: Path, *adapters: tuple[Path, float]) -> Model:
    return merge_adapters(open_model(base), [open_adapter(folder, folder.name, weight) for folder, weight in adapters])


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is not supported; merge the adapter"),
    ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported, only LORA"),
    ({"peft_type": None}, "has no peft_type"),
    ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
    ({"lora_bias": True}, "lora_bias is not supported"),
    ({"use_qalora": True}, "use_qalora is not supported"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
    ({"target_parameters": ["weight"]}, "target_parameters is not supported"),
    ({"megatron_config": {"a": 1}}, "megatron_config is not supported"),
    ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the base model, too"),
    ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' changes the base model, too"),
    ({"layers_pattern": "blocks"}, "layers_pattern is not supported, only 'layers'"),
    ({"r": 0}, "r is 0, expected a positive integer"),
    ({"r": "4"}, "r is '4', expected a positive integer"),
    ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
    ({"lora_alpha": float("inf")}, "lora_alpha is inf, expected a number"),
    ({"bias": "some"}, "bias is 'some', expected one of none, all, lora_only"),
    ({"target_modules": None}, "has no target_modules"),
    ({"target_modules": [1]}, "target_modules is [1], expected a list of names"),
    ({"target_modules": "(", "r": 4}, "is not a regular expression"),
    ({"target_modules": ["c_attn"]}, "target_modules match no layer of the model"),
    ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform needs a list of target_modules"),
    ({"layers_to_transform": [-1]}, "layers_to_transform is [-1], expected a list of layers"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj is 0, expected a positive integer"),
    ({"rank_pattern": [2]}, "rank_pattern is [2], expected an object"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern of q_proj is '8', expected a number"),
    # These contradict the tensors.
    ({"r": 8}, "lora_A.weight is [4, 64], expected [8, 64] (rank 8 in its config"),
    ({"rank_pattern": {"down_proj": 2}}, "down_proj.lora_A.weight is [4, 176], expected [2, 176] (rank 2"),
    ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight belongs to a layer that target_modules"),
    ({"layers_to_transform": [0]}, "layers.1.mlp.down_proj.lora_A.weight belongs to a layer that target_modules"),
    ({"target_modules": "all-linear"}, "lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"),
    ({"modules_to_save": ["lm_head"]}, "lacks lm_head.weight, which modules_to_save in its config names"),
]


@pytest.mark.parametrize(("overrides", "message"), CONFIGS, ids=lambda value: str(value)[:40])
def test_configs_that_are_refused(base: Path, tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    adapter = write_lora(tmp_path / "adapter", SHAPES, **overrides)
    with pytest.raises(CheckpointError) as error:
        merged(base, (adapter, 1.0))
    assert message in str(error.value)


def change(name: str, tensor: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return apply


TENSORS = [
    (change(f"{Q_PROJ}.lora_B.weight", None), f"lacks {Q_PROJ}.lora_B.weight"),
    (change(f"{Q_PROJ}.lora_B.weight", torch.zeros(32, 4)), f"{Q_PROJ}.lora_B.weight is [32, 4], expected [64, 4]"),
    (change(f"{Q_PROJ}.lora_A.weight", torch.zeros(4)), "lora_A.weight is [4], expected [4, 64]"),
    (change(f"{Q_PROJ}.lora_A.weight", torch.zeros(4, 64, dtype=torch.int8)), "lora_A.weight is I8, expected one of"),
    (change(f"{Q_PROJ}.lora_magnitude_vector", torch.ones(64)), "lora_magnitude_vector is not a tensor that the base"),
    (change(f"{Q_PROJ}.lora_embedding_A", torch.ones(4, 64)), "is not of the kind of its layer"),
    (change("base_model.model.transformer.h.0.lora_A.weight", torch.ones(4, 64)), "a layer that the base model does"),
    (
        change("base_model.model._orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 64)),
        "_orig_mod. in the names of its tensors (_orig_mod.model.layers.0.self_attn.q_proj.weight) comes",
    ),
    (change("base_model.model.model.norm.weight", torch.ones(64)), "replaces a tensor that neither modules_to_save"),
    (change("base_model.model.model.layers.9.mlp.up_proj.bias", torch.ones(64)), "is not a tensor that the base model"),
]


@pytest.mark.parametrize(("damage", "message"), TENSORS, ids=[message[:40] for _, message in TENSORS])
def test_tensors_that_are_refused(base: Path, tmp_path: Path, damage: Any, message: str) -> None:
    adapter = write_lora(tmp_path / "adapter", SHAPES)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        merged(base, (adapter, 1.0))
    assert message in str(error.value)


P = "base_model.model."
VOCABULARIES: list[tuple[dict[str, Any], dict[str, torch.Tensor], int]] = [
    ({"modules_to_save": ["embed_tokens"]}, {f"{P}model.embed_tokens.weight": torch.ones(296, 64)}, 296),
    ({"modules_to_save": ["lm_head"]}, {f"{P}lm_head.weight": torch.ones(280, 64)}, 280),
    ({}, {f"{P}model.embed_tokens.weight": torch.ones(289, 64)}, 289),
    (
        {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
        {
            f"{P}model.embed_tokens.lora_embedding_A": torch.ones(4, 296),
            f"{P}model.embed_tokens.lora_embedding_B": torch.ones(64, 4),
        },
        296,
    ),
    (
        {"target_modules": ["q_proj", "down_proj", "lm_head"]},
        {f"{P}lm_head.lora_A.weight": torch.ones(4, 64), f"{P}lm_head.lora_B.weight": torch.ones(296, 4)},
        296,
    ),
]


@pytest.mark.parametrize(("overrides", "tensors", "num_tokens"), VOCABULARIES)
def test_another_vocabulary(
    base: Path, tmp_path: Path, overrides: dict[str, Any], tensors: dict[str, torch.Tensor], num_tokens: int
) -> None:
    """peft cannot load such an adapter onto the base model either, before its vocabulary is resized."""
    adapter = write_lora(tmp_path / "adapter", SHAPES, **overrides)
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    with pytest.raises(UnsupportedModelError) as error:
        merged(base, (adapter, 1.0))
    assert f"has {num_tokens} tokens, the base model 288; " in str(error.value)
    assert f"call resize_token_embeddings({num_tokens}) on the base model, load the adapter" in str(error.value)


MLX_CONFIG = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}


@pytest.mark.parametrize("form", ["as MLX writes it", "renamed", "with peft's config"])
def test_an_adapter_of_mlx(base: Path, tmp_path: Path, form: str) -> None:
    folder = write_lora(tmp_path / "adapter", SHAPES)
    (folder / "adapter_model.safetensors").unlink()
    name = "adapters.safetensors" if form == "as MLX writes it" else "adapter_model.safetensors"
    tensors = {"model.layers.0.self_attn.q_proj.lora_a": torch.ones(64, 8)}
    save_file({**tensors, "model.layers.0.self_attn.q_proj.lora_b": torch.ones(8, 64)}, folder / name)
    if form != "with peft's config":
        (folder / "adapter_config.json").write_text(json.dumps(MLX_CONFIG))
    with pytest.raises(UnsupportedModelError, match=r"holds an adapter in MLX's format, .*mlx_lm\.fuse --model BASE"):
        merged(base, (folder, 1.0))
    if form == "as MLX writes it":
        with pytest.raises(UnsupportedModelError, match="holds an adapter in MLX's format"):
            open_checkpoint(folder)


def test_another_base(tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "adapter", SHAPES)
    wide = write_tiny_llama(tmp_path / "wide", hidden_size=128, num_hidden_layers=2, with_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"lora_A.weight is \[4, 64\], expected \[4, 128\]"):
        merged(wide, (adapter, 1.0))
    deep = write_tiny_llama(tmp_path / "deep", num_hidden_layers=3, with_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.2.*; is it the adapter of another model"):
        merged(deep, (adapter, 1.0))
    flat = write_tiny_llama(tmp_path / "flat", num_hidden_layers=1, with_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"layers\.1.* belongs to a layer that the base model does not have"):
        merged(flat, (adapter, 1.0))


def test_folders_that_are_no_adapters(base: Path, tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            open_adapter(folder, folder.name)
        return str(error.value)

    assert "cannot be read: No such file or directory; check the path" in message(tmp_path / "none")
    assert "is not a valid path" in message(tmp_path / "\0")
    assert f"is a file, expected the adapter's folder; give {base}" in message(base / "model.safetensors")
    assert "is a model, expected an adapter: it has no adapter_config.json" in message(base)
    adapter = write_lora(tmp_path / "adapter", SHAPES)
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "adapter_model.safetensors" in message(adapter)
    file.rename(adapter / "adapter_model.bin")
    assert "PyTorch pickle (adapter_model.bin), which is not supported" in message(adapter)
    (adapter / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors; incomplete download?" in message(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    file.write_bytes(content)
    assert "adapter_config.json holds a JSON list" in message(adapter)


def test_a_matrix_that_embedding_and_head_share(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base", tie_word_embeddings=True, with_tokenizer=False, num_hidden_layers=1)
    adapter = write_lora(tmp_path / "adapter", {"lm_head": (288, 64)}, target_modules=["lm_head"])
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    for more in ({}, {"base_model.model.lm_head.base_layer.weight": torch.ones(288, 64)}):  # as peft saves it, too
        save_file({**more, **factors}, file)
        with pytest.raises(UnsupportedModelError, match="changes a matrix that the base model has as embedding and as"):
            merged(base, (adapter, 1.0))


def test_what_is_replaced_has_no_weight(base: Path, tmp_path: Path) -> None:
    folders = [write_lora(tmp_path / name, SHAPES, modules_to_save=["norm"]) for name in "ab"]
    for folder in folders:
        file = folder / "adapter_model.safetensors"
        saved = {
            f"base_model.model.{name}": torch.ones(64) for name in open_model(base).tensors.tensors if "norm" in name
        }
        save_file({**load_file(file), **saved}, file)
    for adapters in ([(folders[0], 0.5)], [(folders[0], 1.0), (folders[1], 1.0)]):
        with pytest.raises(UnsupportedModelError, match="so the adapter cannot have a weight, nor can another adapter"):
            merged(base, *adapters)


@pytest.mark.parametrize(
    ("value", "alpha", "where"),
    [
        (float("nan"), 8, "lora_A.weight in"),
        (3e38, 8, "once the adapter is added"),
        (1, 1e300, "once the adapter is added"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite(base: Path, tmp_path: Path, value: float, alpha: float, where: str) -> None:
    """Named when the weight is read."""
    adapter = write_lora(tmp_path / "adapter", SHAPES, lora_alpha=alpha)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.lora_A.weight"][1, 2] = value
    save_file(tensors, file)
    info = merged(base, (adapter, 1.0)).tensors.tensors["model.layers.1.self_attn.q_proj.weight"]
    with TensorReader() as reader, pytest.raises(CheckpointError) as error:
        reader.read_tensor_into(info, bytearray(info.num_bytes))
    assert "layers.1.self_attn.q_proj" in str(error.value)
    assert where in str(error.value)


def test_names_of_a_config_are_harmless(base: Path, tmp_path: Path) -> None:
    """Control characters of a stranger's config reach no message unescaped."""
    adapter = write_lora(tmp_path / "adapter", SHAPES)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "\x1b[2J"}))
    with pytest.raises(UnsupportedModelError, match=r"'\\x1b\[2J' is not supported"):
        merged(base, (adapter, 1.0))
