"""Tensors under names with or without the base model's prefix: loaded as transformers loads them, logits compared."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized import SIZES, export
from row_steps import PROMPT, logits_of, relative_error
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.layout import EMBEDDING, HEAD
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.torch.load import load

transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]


def without_prefix(name: str) -> str:
    return name.removeprefix("model.")


def doubled(name: str) -> str:
    return f"model.{name}"


def mixed(name: str) -> str:
    return without_prefix(name) if "layers.1" in name else doubled(name) if "norm" in name else name


def rename(folder: Path, new_name: Callable[[str], str], **extra: float) -> None:
    """Rename the tensors of a folder; `extra` adds copies of the last norm, by a factor (__ stands for a dot)."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {new_name(name): tensor for name, tensor in tensors.items()}
    for keyword, factor in extra.items():
        renamed[keyword.replace("__", ".")] = tensors["model.norm.weight"] * factor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def their_logits(folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT[:40]])).logits[0, -1].numpy()


def our_logits(folder: Path) -> np.ndarray:
    return logits_of(load(open_model(folder), max_seq_len=64), PROMPT[:40])


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("new_name", [without_prefix, doubled, mixed])
def test_logits_equal_transformers(new_name: Callable[[str], str], is_tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, tie_word_embeddings=is_tied)
    before = our_logits(folder)
    rename(folder, new_name)
    assert (our_logits(folder) == before).all()
    assert relative_error(before, their_logits(folder)) < 1e-5
    model = open_model(folder)
    assert model.tensors.unused == ()
    assert all(info.name == name for name, info in model.tensors.tensors.items())


@pytest.mark.parametrize(
    "factors", [{"norm__weight": 2}, {"model__model__norm__weight": 2, "norm__weight": 3}], ids=str
)
def test_of_several_the_one_that_transformers_takes(factors: dict[str, float], tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    rename(folder, str, **factors)
    assert relative_error(our_logits(folder), their_logits(folder)) < 1e-5
    assert len(open_model(folder).tensors.unused) == len(factors)


def test_a_tied_matrix_under_the_head_s_doubled_name(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, tie_word_embeddings=True)
    rename(folder, lambda name: f"model.{HEAD}" if name == EMBEDDING else name)
    assert relative_error(our_logits(folder), their_logits(folder)) < 1e-5


@pytest.mark.parametrize("new_name", [without_prefix, doubled])
def test_quantized_layers(new_name: Callable[[str], str], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16, with_tokenizer=False, **SIZES)
    folder = export(source, tmp_path / "export", ExportOptions(WeightScheme(8, 128)))
    before = our_logits(folder)
    rename(folder, new_name)
    assert (our_logits(folder) == before).all()
    assert relative_error(before, their_logits(folder)) < 1e-3


@pytest.mark.parametrize("new_name", [without_prefix, doubled])
def test_exports_bear_the_model_s_names(new_name: Callable[[str], str], tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False)
    export(source, tmp_path / "before", ExportOptions(WeightScheme(8, None)))
    rename(source, new_name)
    export(source, tmp_path / "after", ExportOptions(WeightScheme(8, None)))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_prefix_three_times_is_another_model_s(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    rename(folder, lambda name: f"model.model.{name}")
    with pytest.raises(CheckpointError, match=r"model\.model\. in the names .* comes from a program that has"):
        open_model(folder)


def inside_each_layer(part: str) -> Callable[[str], str]:
    return lambda name: re.sub(r"(layers\.\d+)\.", rf"\1.{part}.", name)


@pytest.mark.parametrize(
    ("new_name", "wrapper", "writer"),
    [
        (lambda name: f"_orig_mod.{name}", "_orig_mod.", "torch.compile"),
        (lambda name: f"module.{name}", "module.", "DataParallel or DeepSpeed"),
        (lambda name: f"module._orig_mod.{name}", "module._orig_mod.", "DataParallel or DeepSpeed"),
        (lambda name: f"_fsdp_wrapped_module.{name}", "_fsdp_wrapped_module.", "FSDP"),
        (inside_each_layer("_fsdp_wrapped_module"), "_fsdp_wrapped_module.", "FSDP"),
        (inside_each_layer("_orig_mod"), "_orig_mod.", "torch.compile"),
        (inside_each_layer("_checkpoint_wrapped_module"), "_checkpoint_wrapped_module.", "activation checkpointing"),
        (lambda name: f"base_model.model.{name}", "base_model.model.", "peft"),
        (lambda name: f"language_model.{name}", "language_model.", "a model for images and text"),
        (lambda name: f"model.language_model.{without_prefix(name)}", "model.language_model.", "a model for images"),
        (lambda name: f"transformer.{without_prefix(name)}", "transformer.", "a program that has the model as a part"),
        (lambda name: f"policy.llm.{name}", "policy.llm.", "a program that has the model as a part"),
    ],
)
def test_a_wrapper_in_all_names_is_named(
    new_name: Callable[[str], str], wrapper: str, writer: str, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    rename(folder, new_name)
    with pytest.raises(CheckpointError) as error:
        open_model(folder)
    assert f"{folder}: {wrapper} in the names of its tensors (" in str(error.value)
    assert f" comes from {writer}" in str(error.value)
    assert "download" not in str(error.value)
    fix = "merge the adapter with peft" if writer == "peft" else f"or remove {wrapper} from the names"
    assert fix in str(error.value)
    if "base" not in wrapper:  # the message's advice works
        rename(folder, lambda name: name.replace(wrapper, ""))
        open_model(folder)


def test_wrapped_names_of_quantized_layers(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False)
    folder = export(source, tmp_path / "export", ExportOptions(WeightScheme(8, None)))
    rename(folder, lambda name: f"_orig_mod.{name}")
    with pytest.raises(CheckpointError, match=r"_orig_mod\. in the names of its tensors .* comes from torch\.compile"):
        open_model(folder)


def test_a_missing_layer_is_no_wrapper(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    rename(folder, lambda name: name.replace("layers.1.", "layers.7."))
    with pytest.raises(CheckpointError, match="tensors are missing: .*incomplete download"):
        open_model(folder)


def write_shards(folder: Path, absent: str) -> None:
    """Move the weights into two shards without the tensor `absent`, which the index lists."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted({*tensors, absent})
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        held = {name: tensors[name] for name in part if name != absent}
        save_file(held, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shards[index % 2] for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_that_lists_the_head_of_a_tied_model(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, tie_word_embeddings=True)
    before = our_logits(folder)
    write_shards(folder, absent=HEAD)
    assert (our_logits(folder) == before).all()
    assert relative_error(before, their_logits(folder)) < 1e-5


def test_an_index_that_lists_a_head_which_the_model_lacks(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    write_shards(folder, absent=HEAD)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing and config.json does not set tie_word_emb"):
        open_model(folder)
