"""Random tiny configurations of every family, as strangers write them, and folders that hold such a model.

A number is one configuration, always the same. A key's value is drawn with its missing, null, falsy and
contradicting forms; which of them a runner accepts is not known here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

PROMPT_LENGTH = 40  # beyond every window and every original context that is drawn
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "ministral", "cwm", "seed_oss", "internlm3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MISSING = object()


@dataclass(frozen=True)
class OddConfig:
    """A config.json, and how its weights are stored."""

    values: dict[str, Any]
    dtype: torch.dtype
    num_shards: int
    head: str  # of a tied model: "left out", "stored", or "stored and different"
    saved_by_transformers: bool  # so that config.json is its own spelling of the same


def odd_config(number: int) -> OddConfig:
    """Configuration `number`."""
    rng = Random(f"odd configuration {number}")
    values = _draw_values(rng)
    if rng.random() < 0.12:  # one key of any kind becomes null
        values[rng.choice(sorted(values))] = None
    if rng.random() < 0.1:  # or goes missing, where there is a default
        values.pop(rng.choice(["num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta"]), None)
    return OddConfig(
        values,
        rng.choice(DTYPES),
        rng.choice([1, 1, 1, 2, 3]),
        rng.choice(["left out", "left out", "stored", "stored and different"]),
        rng.random() < 0.2,
    )


def _draw_values(rng: Random) -> dict[str, Any]:
    family = rng.choice(FAMILIES)
    num_kv_heads, group = rng.choice([(1, 1), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
    num_heads, num_layers = num_kv_heads * group, rng.choice([1, 2, 2, 3, 5])
    head_dim = rng.choice([2, 4, 6, 8, 10, 12, 16, 24])
    # hidden_size is heads times head_dim, or another multiple of the heads, or, rarely, no multiple.
    hidden_size = rng.choice([num_heads * head_dim, num_heads * head_dim, num_heads * rng.choice([4, 5, 8, 10])])
    hidden_size += rng.choice([0] * 12 + [1, 2])
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": rng.choice([29, 48, 65]),
        "hidden_size": hidden_size,
        "intermediate_size": rng.choice([16, 23, 40]),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": rng.choice([16, 64, 64, 512, 4096]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-6, 1e-8, 1e-12, 0.1]),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if hidden_size != num_heads * head_dim or rng.random() < 0.3:
        values["head_dim"] = head_dim
    optional = {
        "tie_word_embeddings": [MISSING, True, False],
        "attention_bias": [MISSING, MISSING, True, False],
        "mlp_bias": [MISSING, MISSING, True, False],
        "attention_out_bias": [MISSING, True, False],
        "qkv_bias": [MISSING, MISSING, True, False],
        "bias": [MISSING, MISSING, True, False],
        "hidden_act": ["silu"] * 40 + [MISSING, "gelu"],
        "architectures": [
            MISSING,
            None,
            [transformers.AutoModelForCausalLM._model_mapping[_config_class(family)].__name__],
        ],
        "rope_theta": [MISSING, 10000.0, 10000, 500.0, 1e6, 0.5] * 2 + [1.0],
        "partial_rotary_factor": [MISSING] * 100 + [None, 1.0, 1, 0.5],
        "original_max_position_embeddings": [MISSING] * 40 + [None] + [8, 16, 24] * 4,
        "is_causal": [MISSING] * 100 + [True, False, None],
        "per_layer_config": [MISSING] * 100 + [None, {"0": {"head_dim": 4}}],
        "sliding_window": [MISSING, None, 1, 3, 8, 16, 64],
        "use_sliding_window": [MISSING, True, True, False],
        "max_window_layers": [MISSING, 0, 1, 2, num_layers, 28, -1],
        "layer_types": [MISSING] * (30 if family in ("llama", "seed_oss", "internlm3") else 8)
        + [None, _layer_types(rng, num_layers), _layer_types(rng, num_layers)],
        "no_rope_layers": [
            MISSING,
            None,
            [rng.randint(0, 1) for _ in range(num_layers + rng.choice([0] * 6 + [1, -1]))],
        ],
        "no_rope_layer_interval": [MISSING, MISSING, 2, 3, 1, -2] * 3 + [0],
    }
    for key, choices in optional.items():
        if (value := rng.choice(choices)) is not MISSING:
            values[key] = value
    # Most files have what transformers needs of these families.
    if family == "internlm3" and rng.random() < 0.9:
        for key in ("attention_bias", "mlp_bias", "qkv_bias", "bias"):
            values.pop(key, None)
        values |= dict.fromkeys(
            rng.choice([(), ("qkv_bias", "bias"), ("attention_bias", "mlp_bias")]), rng.random() < 0.7
        )
    if family in ("ministral", "cwm") and rng.random() < 0.9:
        values["head_dim"] = head_dim
        if values.get("sliding_window", 0) is None:
            del values["sliding_window"]
    # Most files have one rotary object, in one of the two spellings; some have none, or both.
    for key in rng.choice([[], ["rope_scaling"], ["rope_scaling"], ["rope_parameters"], ["rope_parameters"], _ROPES]):
        values[key] = _rotary_object(rng)
        if "dynamic" in (values[key] or {}).values():  # which changes the angles of texts beyond the context
            values["max_position_embeddings"] = 4096
    return values


_ROPES = ["rope_scaling", "rope_parameters"]


def _config_class(family: str) -> Any:
    return transformers.CONFIG_MAPPING[family]


def _layer_types(rng: Random, num_layers: int) -> list[str]:
    names = ["full_attention", "sliding_attention"]
    if rng.random() < 0.1:
        names.append(rng.choice(["attention", "chunked_attention", "linear"]))
    return [rng.choice(names) for _ in range(num_layers + rng.choice([0] * 9 + [1]))]


def _rotary_object(rng: Random) -> dict[str, Any] | None:
    rope_type = rng.choice(
        ["default", "linear", "llama3", "llama3", "yarn", "yarn", "yarn", "yarn"] * 4 + ["dynamic", None, {}]
    )
    if not rope_type:
        return rope_type
    choices: dict[str, list[Any]] = {
        rng.choice(["rope_type", "rope_type", "type"]): [rope_type],
        "rope_theta": [MISSING, MISSING, 10000.0, 300, 2e5] * 4 + [None],
        "factor": [4.0, 4.0, 8, 2.5, 1.0, 0.5] + rng.choice([[], [], [], [MISSING, None]]),
        "original_max_position_embeddings": [8, 16, 16, 24, 32.0, MISSING] + rng.choice([[], [], [], [None]]),
        "partial_rotary_factor": [MISSING] * 60 + [1.0, 0.5, None],
    }
    if rng.random() < 0.02:
        choices["full_attention"] = [{"rope_type": "linear", "factor": 2.0}]
    if rope_type == "llama3":
        choices |= {
            "low_freq_factor": [1.0, 1.0, 1, 2.0] + rng.choice([[], [], [], [MISSING, None, 8.0]]),
            "high_freq_factor": [4.0, 4.0, 4, 2.5] + rng.choice([[], [], [], [MISSING, None]]),
        }
    if rope_type == "yarn":
        choices |= {
            "mscale": [MISSING, MISSING, None, 0, 0.0, 1.0, 0.7, -1.5],
            "mscale_all_dim": [MISSING, MISSING, None, 0, 0.0, 1.0, 0.4],
            "attention_factor": [MISSING] * 5 + [None, 1.3, 1, 0, 0.0, -0.8],
            "beta_fast": [MISSING, MISSING, None, 0, 16, 64.0, 2] + rng.choice([[], [], [], [-1.0]]),
            "beta_slow": [MISSING, MISSING, None, 0, 2, 0.25],
            "truncate": [MISSING, MISSING, None, True, False],
        }
    drawn = {key: rng.choice(options) for key, options in choices.items()}
    return {key: value for key, value in drawn.items() if value is not MISSING}


def write_odd_model(config: OddConfig, folder: Path, seed: int) -> None:
    """A folder of that configuration with random weights; the names and shapes are transformers' own.

    Raises: whatever transformers raises for a configuration that it refuses; config.json is there all the same
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.values))
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, tensor.shape, generator) for name, tensor in model.state_dict().items()}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if hf_config.tie_word_embeddings:
        tensors.pop(head, None)
        if config.head == "stored":
            tensors[head] = tensors[embedding].clone()
        elif config.head == "stored and different":
            tensors[head] = _random(head, tensors[embedding].shape, generator)
    if config.saved_by_transformers:
        hf_config.save_pretrained(folder)
    _save({name: tensor.to(config.dtype) for name, tensor in tensors.items()}, folder, config.num_shards)


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Weights whose scores differ by several units, so that a wrong rotation or window is seen."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    return values if len(shape) == 1 or "embed" in name else values * 2 * shape[-1] ** -0.5


def _save(tensors: dict[str, torch.Tensor], folder: Path, num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        shard = dict(list(tensors.items())[index::num_shards])
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
