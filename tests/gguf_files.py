"""Writes GGUF files of Hugging Face folders with the `gguf` library, as llama.cpp's converter names and orders them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INTERLEAVED = ("llama", "smollm3")
# Where a block has its scales in fp16.
_SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


def blocks_of(values: np.ndarray, kind: Kind, seed: int = 0) -> np.ndarray:
    """The values as bytes of a type; random blocks of the same size where the library only reads the type."""
    if kind not in _SCALES:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (len(values), values.shape[1] // block, size), np.uint8)
    for place in _SCALES[kind]:
        scales = generator.uniform(1e-5, 4e-5, data.shape[:2]).astype(np.float16)
        data[:, :, place : place + 2] = scales[:, :, None].view(np.uint8)
    return data.reshape(len(values), -1)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    module, _, part = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{part}"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{LAYER_NAMES[rest]}.{part}"


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key matrix: `LlamaModel.permute` of its converter."""
    return values.reshape(num_heads, 2, len(values) // num_heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    source: Path,
    path: Path,
    kind: Kind = Kind.F16,
    *,
    kinds: dict[str, Kind] | None = None,
    split_tensors: int = 0,
    **metadata: Any,
) -> Path:
    """A file of the model in `source`: matrices of a type, or of those of `kinds` by a part of their name."""
    config = json.loads((source / "config.json").read_text())
    family = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, family, split_max_tensors=split_tensors)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add_tokenizer(writer, source, config)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), *value)
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        its_heads = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
        if family in INTERLEAVED and its_heads:
            values = interleaved(values, its_heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        its_kind = next((its for part, its in (kinds or {}).items() if part in name), kind)
        data = np.ascontiguousarray(blocks_of(values, its_kind, seed=len(name)))
        writer.add_tensor(gguf_name(name), data, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any], pre: str = "gpt-2") -> None:
    """The tokens of a byte-level tokenizer.json."""
    content = json.loads((source / "tokenizer.json").read_text())
    words = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab()
    added = {one["id"]: one for one in content["added_tokens"]}
    tokens = {number: word for word, number in words.items()}
    size = max(config["vocab_size"], 1 + max(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    kinds = [gguf.TokenType.NORMAL if number in tokens else gguf.TokenType.UNUSED for number in range(size)]
    for number, one in added.items():
        kinds[number] = gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
