"""Matching a folder's tensors with the config: heads, missing, misshapen and unused tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.layout import EMBEDDING, HEAD
from llmcli.checkpoint.model import Model, open_model
from llmcli.errors import CheckpointError, UnsupportedModelError


def changed(folder: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Model:
    """Open the folder after setting tensors (None removes one; __ in a keyword stands for a dot)."""
    tensors = load_file(folder / "model.safetensors")
    for keyword, tensor in changes.items():
        name = keyword.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return open_model(folder)


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", with_tokenizer=False)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", with_tokenizer=False, tie_word_embeddings=True)


def test_untied(untied: Path) -> None:
    model = open_model(untied)
    assert model.tensors.head == HEAD
    assert model.tensors.unused == ()


def test_tied_shares_the_embedding(tied: Path) -> None:
    model = open_model(tied)
    assert model.tensors.head == EMBEDDING
    assert HEAD not in model.tensors.tensors


def test_tied_with_an_equal_copy_of_the_head_shares_one_buffer(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    model = changed(tied, lm_head__weight=embedding.clone())
    assert model.tensors.head == EMBEDDING
    assert HEAD not in model.tensors.tensors
    assert model.tensors.unused == ()


def test_tied_with_another_head_uses_that_head(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    assert changed(tied, lm_head__weight=embedding + 1).tensors.head == HEAD


def test_tied_stored_under_the_name_of_the_head_only(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    model = changed(tied, lm_head__weight=embedding, model__embed_tokens__weight=None)
    assert model.tensors.head == EMBEDDING
    assert model.tensors.tensors[EMBEDDING].name == EMBEDDING  # runners know it by that name only
    assert model.tensors.tensors[EMBEDDING].offset == model.checkpoint.tensors[HEAD].offset


def test_untied_without_a_head_is_refused_with_the_remedy(untied: Path) -> None:
    with pytest.raises(CheckpointError, match="lm_head.weight is missing .* set tie_word_embeddings to true"):
        changed(untied, lm_head__weight=None)


def test_missing_tensors_are_named(untied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 of 30 tensors are missing: model.layers.1.mlp.up_proj.weight"):
        changed(untied, model__layers__1__mlp__up_proj__weight=None)


def test_a_config_of_more_layers_names_some_and_counts_the_rest(untied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"18 of 48 tensors are missing: model.layers.3.* and 14 more"):
        changed(untied, {"num_hidden_layers": 5})


def test_misshapen_tensors_are_explained(untied: Path) -> None:
    expected = (
        r"model.layers.2.self_attn.k_proj.weight in model.safetensors is \[64, 64\], expected \[16, 64\] "
        r"\(num_key_value_heads 2 \* head_dim 8, hidden_size in config.json\)"
    )
    with pytest.raises(CheckpointError, match=expected):
        changed(untied, model__layers__2__self_attn__k_proj__weight=torch.zeros(64, 64))


def test_integer_weights_are_refused(untied: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="model.norm.weight in model.safetensors is I32, expected one of BF16"
    ):
        changed(untied, model__norm__weight=torch.zeros(64, dtype=torch.int32))


def test_unused_tensors_are_listed_but_rotary_tables_are_not(untied: Path) -> None:
    table = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(4)}
    model = changed(untied, vision__weight=torch.zeros(3), **table)
    assert model.tensors.unused == ("vision.weight",)


def test_biases_the_config_does_not_ask_for_are_unused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, attention_bias=True)
    assert len(changed(folder, {"attention_bias": False}).tensors.unused) == 3 * 4
