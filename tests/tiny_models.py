"""Writes tiny random LLaMA folders without transformers, so that they only need torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmcli.checkpoint.layout import HEAD, expected_tensors
from llmcli.config.llama import LlamaConfig

NULL = object()  # an override that writes null, where None removes the key

# Ids 0 to 255 are bytes, then the special tokens.
BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 256, 257

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}


def tiny_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights whose logits differ by several units, so that sampling is neither flat nor certain."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor in expected_tensors(config):
        scale = 1.0 if len(tensor.shape) == 1 or "embed" in tensor.name else tensor.shape[-1] ** -0.5
        tensors[tensor.name] = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.name.endswith("norm.weight"):
            tensors[tensor.name] = 1 + 0.1 * tensors[tensor.name]
    if not config.tie_word_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        tensors[HEAD] = torch.randn(shape, generator=generator) * 2 * config.hidden_size**-0.5
    return tensors


def write_tiny_llama(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, with_tokenizer: bool = True, **overrides: Any
) -> Path:
    """A model folder of CONFIG with `overrides`; a value of None removes the key."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in {**CONFIG, **overrides}.items() if value is not None}
    config = {key: None if value is NULL else value for key, value in config.items()}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tiny_tensors(LlamaConfig.from_dict(config, "config.json"), seed)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    if with_tokenizer:
        write_byte_tokenizer(folder)
    return folder


def write_broken_llama(folder: Path) -> Path:
    """A model with one layer whose logits are NaN, as the products of its weights overflow."""
    write_tiny_llama(folder, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer.json with one token per byte, and BOS before every text."""
    vocabulary = {_byte_symbol(byte): byte for byte in range(256)} | {BOS: BOS_ID, EOS: EOS_ID}
    added = [
        {"id": token_id, "content": content, "special": True}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for content, token_id in ((BOS, BOS_ID), (EOS, EOS_ID))
    ]
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, text],
            "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))


def _byte_symbol(byte: int) -> str:
    """The printable character that stands for a byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
