"""The families of LLaMA-like models: for each `model_type`, its architecture, its defaults and what it adds.

A family is listed here if its forward pass is LLaMA's with these traits; every other `model_type` is refused by name.
Source: Hugging Face's configuration and modeling files of each family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.config.fields import Fields, shown
from llmcli.errors import CheckpointError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


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
    """One `model_type`.

    `defaults` are the values Hugging Face assumes where config.json lacks a key. `derived_if_null` are the keys whose
    null means a value that follows from the others, not the default; other families refuse that null.
    """

    architecture: str
    read_traits: Callable[[Fields, int], Traits]
    defaults: Mapping[str, Any]
    derived_if_null: frozenset[str]

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The object with the defaults, and without the nulls that mean a derived value."""
        values = {**self.defaults, **config}
        return {key: value for key, value in values.items() if value is not None or key not in self.derived_if_null}


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
    if SLIDING in _layer_types(fields, [FULL] * num_layers):
        # transformers has its own prompt see everything then, and the tokens after it a window.
        raise UnsupportedModelError(f"{fields.where}: layer type {SLIDING} is not supported for llama")
    return _traits(
        num_layers, has_bias=fields.boolean("attention_bias", False), mlp_bias=fields.boolean("mlp_bias", False)
    )


def _mistral(fields: Fields, num_layers: int) -> Traits:
    default = FULL if fields.is_null("sliding_window") else SLIDING
    return _traits(num_layers, sliding_windows=_windows(fields, _layer_types(fields, [default] * num_layers)))


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
    uses_rope = _smollm3_rope(fields, num_layers)
    is_used = fields.boolean("use_sliding_window", False)
    has_window = is_used and not fields.is_null("sliding_window")
    types = _layer_types(fields, [SLIDING if has_window and not has_rope else FULL for has_rope in uses_rope])
    if SLIDING in types and not is_used:
        # transformers masks by layer_types and never asks use_sliding_window there.
        fields.notes.append("use_sliding_window is false, but layer_types has sliding windows: they are used")
    return _traits(
        num_layers,
        has_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_windows=_windows(fields, types),
        uses_rope=uses_rope,
    )


def _smollm3_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: those that no_rope_layers gives a 1, despite its name, or all but every fourth one."""
    interval = fields.integer("no_rope_layer_interval", 4)
    if fields.is_null("no_rope_layers"):
        if interval == 0:
            raise fields.wrong("no_rope_layer_interval", "another number than 0")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    flags = fields.int_list("no_rope_layers", [])
    if len(flags) < num_layers:
        raise CheckpointError(f"{fields.where}: no_rope_layers has {len(flags)} entries, expected {num_layers}")
    return tuple(flag != 0 for flag in flags[:num_layers])


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The first max_window_layers layers see everything, the others a window, unless layer_types says otherwise."""
    is_used = fields.boolean("use_sliding_window", False)
    has_window = is_used and not fields.is_null("sliding_window")
    first = fields.integer("max_window_layers", 28)
    types = _layer_types(fields, [SLIDING if has_window and index >= first else FULL for index in range(num_layers)])
    if SLIDING in types and not is_used:
        raise CheckpointError(f"{fields.where}: layer_types has {SLIDING}, but use_sliding_window is not true")
    return _windows(fields, types)


def _layer_types(fields: Fields, default: list[str]) -> list[str]:
    types = fields.string_list("layer_types", default)
    if len(types) != len(default):
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries, expected {len(default)}")
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise UnsupportedModelError(
            f"{fields.where}: layer type {shown(unknown[0])} is not supported, expected {FULL} or {SLIDING}"
        )
    return types


def _windows(fields: Fields, types: list[str]) -> tuple[int | None, ...]:
    if SLIDING not in types:
        return (None,) * len(types)
    if fields.is_null("sliding_window"):
        raise CheckpointError(f"{fields.where}: layer_types has {SLIDING}, but there is no sliding_window")
    window = fields.positive_int("sliding_window")
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


_BOTH = frozenset({"head_dim", "num_key_value_heads"})
_KV_HEADS = frozenset({"num_key_value_heads"})
_QWEN = {"sliding_window": 4096, "num_key_value_heads": 32, "max_position_embeddings": 32768}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, {}, _BOTH),
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        frozenset({"head_dim"}),
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _QWEN, _KV_HEADS),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, {**_QWEN, "head_dim": 128}, _KV_HEADS),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        _KV_HEADS,
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
            f"{where}: model_type {shown(model_type)} is not supported, expected one of: {supported}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UnsupportedModelError(
            f"{where}: architectures {shown(architectures)} is not supported, expected [{family.architecture!r}]"
        )
    return family
