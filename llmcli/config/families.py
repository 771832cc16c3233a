"""The families of LLaMA-like models: for each `model_type`, its architecture, its defaults and what it adds.

A family is listed here if its forward pass is LLaMA's with these traits; every other `model_type` is refused by name.
Source: Hugging Face's configuration and modeling files of each family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.config.fields import Fields
from llmcli.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Traits:
    """What a family adds to plain LLaMA. The tuples have one entry per layer."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each query and each key head, before the rotation
    sliding_windows: tuple[int | None, ...]  # tokens a layer looks back at, itself included; None is all
    uses_rope: tuple[bool, ...]


@dataclass(frozen=True)
class Family:
    """One `model_type`. `defaults` are the values Hugging Face assumes where config.json lacks a key."""

    architecture: str
    read_traits: Callable[[Fields, int], Traits]
    defaults: Mapping[str, Any]


def _traits(num_layers: int, *, has_bias: bool = False, **traits: Any) -> Traits:
    plain: dict[str, Any] = {
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_windows": (None,) * num_layers,
        "uses_rope": (True,) * num_layers,
    }
    return Traits(**{**plain, **traits})


def _llama(fields: Fields, num_layers: int) -> Traits:
    return _traits(
        num_layers, has_bias=fields.boolean("attention_bias", False), mlp_bias=fields.boolean("mlp_bias", False)
    )


def _mistral(fields: Fields, num_layers: int) -> Traits:
    return _traits(num_layers, sliding_windows=(_window(fields),) * num_layers)


def _qwen2(fields: Fields, num_layers: int) -> Traits:
    return _traits(num_layers, qkv_bias=True, sliding_windows=_qwen_windows(fields, num_layers))


def _qwen3(fields: Fields, num_layers: int) -> Traits:
    return _traits(
        num_layers,
        has_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        sliding_windows=_qwen_windows(fields, num_layers),
    )


def _smollm3(fields: Fields, num_layers: int) -> Traits:
    interval = fields.positive_int("no_rope_layer_interval", 4)
    by_interval = [int((index + 1) % interval != 0) for index in range(num_layers)]
    flags = fields.int_list("no_rope_layers", by_interval)  # despite its name, 1 means that the layer has rotary
    if len(flags) < num_layers:
        raise CheckpointError(f"{fields.where}: no_rope_layers has {len(flags)} entries, expected {num_layers}")
    uses_rope = tuple(flag != 0 for flag in flags[:num_layers])
    window = _window(fields) if fields.boolean("use_sliding_window", False) else None
    by_rope = ["full_attention" if has_rope else "sliding_attention" for has_rope in uses_rope]
    return _traits(
        num_layers,
        has_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_windows=_windows_by_type(fields, window, by_rope),
        uses_rope=uses_rope,
    )


def _window(fields: Fields) -> int | None:
    return None if fields.values.get("sliding_window") is None else fields.positive_int("sliding_window")


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The first max_window_layers layers see everything, the others a window, unless layer_types says otherwise."""
    window = _window(fields) if fields.boolean("use_sliding_window", False) else None
    full = fields.positive_int("max_window_layers", 28)
    types = ["full_attention" if index < full else "sliding_attention" for index in range(num_layers)]
    return _windows_by_type(fields, window, types)


def _windows_by_type(fields: Fields, window: int | None, default_types: list[str]) -> tuple[int | None, ...]:
    types = fields.string_list("layer_types", default_types)
    if len(types) != len(default_types):
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries, expected {len(default_types)}")
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(
            f"{fields.where}: layer type {unknown[0]!r} is not supported, expected full_attention or sliding_attention"
        )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, {}),
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, {"sliding_window": 4096, "max_position_embeddings": 32768}),
    "qwen3": Family(
        "Qwen3ForCausalLM", _qwen3, {"sliding_window": 4096, "max_position_embeddings": 32768, "head_dim": 128}
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family a config.json belongs to.

    Raises: UnsupportedModelError naming the model_type or architecture this program does not run.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"{where}: model_type {model_type!r} is not supported, expected one of: {supported}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UnsupportedModelError(
            f"{where}: architectures {architectures!r} is not supported, expected [{family.architecture!r}]"
        )
    return family
