"""Writes trained weights as a Hugging Face folder in bfloat16, with tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmcli.resources import resource_folder

from .tokenizer import BOS_ID, CHAT_TEMPLATE, END_ID, EOS_ID, MARKER_IDS, UNK_ID

# Longer than any story, and leaves room for a request in 1,024 tokens.
MAX_NEW_TOKENS = 900


_README = """\
---
license: apache-2.0
library_name: llmcli
---

# The storyteller in 16 bits

The weights that the storyteller of llmcli is quantized from, for `llmcli quantize`, `eval` and `diff` to be tried on.
What the model is, and what was measured, stands in the card of the int8 form, `llmcli/resources/storyteller/README.md`.
"""


def _story_preset() -> dict[str, float]:
    """What the story preset sets, by transformers' names, which are ours."""
    return tomllib.loads((resource_folder("configs") / "story.toml").read_text())["sampling"]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], max_file_mib: float) -> None:
    """One file if it is small enough, else several with an index, as Hugging Face names them."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        num_bytes = weight.numel() * weight.element_size()
        if parts[-1] and size + num_bytes > max_file_mib * 2**20:
            parts.append({})
            size = 0
        parts[-1][name] = weight
        size += num_bytes
    names = (
        [f"model-{index + 1:05}-of-{len(parts):05}.safetensors" for index in range(len(parts))]
        if len(parts) > 1
        else ["model.safetensors"]
    )
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # the library writes it for its owner alone
    if len(parts) > 1:
        total = sum(weight.numel() * weight.element_size() for weight in weights.values())
        weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def export(weights_file: Path, tokenizer: Path, folder: Path, max_file_mib: float = 1024.0) -> None:
    """Write the folder.

    Raises:
        FileNotFoundError: there are no weights or no tokenizer.
    """
    state = torch.load(weights_file, map_location="cpu", weights_only=True)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": weight.to(torch.bfloat16).contiguous() for name, weight in state["model"].items()}
    _write_weights(folder, weights, max_file_mib)
    shutil.copyfile(tokenizer, folder / "tokenizer.model")
    (folder / "README.md").write_text(_README, encoding="utf-8")
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **state["shape"], "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "tie_word_embeddings": True, "bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "pad_token_id": None,
        "rope_scaling": None, "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True,
    })  # fmt: skip
    _write_json(folder / "generation_config.json", {
        "bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "do_sample": True, **_story_preset(),
        "max_new_tokens": MAX_NEW_TOKENS,
    })  # fmt: skip
    added = {UNK_ID: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>", **{index: marker for marker, index in MARKER_IDS.items()}}
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "pad_token": None, "model_max_length": state["shape"]["max_position_embeddings"],
        "additional_special_tokens": list(MARKER_IDS), "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(index): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                         "special": True}
            for index, text in sorted(added.items())
        },
    })  # fmt: skip


def main() -> None:
    """Read the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--max-file-mib", type=float, default=1024.0, help="split the weights into files of at most this size"
    )
    arguments = parser.parse_args()
    export(arguments.weights, arguments.tokenizer, arguments.out, arguments.max_file_mib)


if __name__ == "__main__":
    main()
