"""`LoraConfig`: what an adapter_config.json says. Refuses by name what is not plain LoRA of a text generator.

Source: peft 0.21, `LoraConfig`; a key means here what it means there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.checkpoint.folder import mlx_adapter_error
from llmcli.config.fields import Fields
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.reading import CONFIG

ADAPTER_CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")

# What says how an adapter came about, or where it is to run, and nothing about its mathematics. `fan_in_fan_out` is for
# layers that store their weights transposed, which these models have none of; peft ignores it there, too.
_NEUTRAL = frozenset(
    {"peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "task_type"}
    | {"lora_dropout", "fan_in_fan_out", "init_lora_weights", "megatron_core", "runtime_config", "qalora_group_size"}
    | {"eva_config", "corda_config", "lora_ga_config", "loftq_config"}
)
_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "target_modules"}
    | {"exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"}
)
_MLX_KEYS = {"fine_tune_type", "lora_parameters", "lora_layers"}
# Beginnings that change only the adapter's own weights; the others change those of the base model, too.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
_LAYERS_PATTERNS: tuple[Any, ...] = (None, "", [], "layers", ["layers"])


@dataclass(frozen=True)
class LoraConfig:
    """A checked config. `layers` None is all layers; patterns are expressions with their rank or alpha, in order."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    bias: str
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    modules_to_save: tuple[str, ...]
    layers: frozenset[int] | None
    ties_weights: bool
    base_name: str

    @classmethod
    def load(cls, path: Path) -> "LoraConfig":
        """Read and check the file.

        Raises: CheckpointError for values that mean nothing, UnsupportedModelError naming what is not supported
        """
        values = CONFIG.read_json_object(path)
        _refuse_others(values, path)
        fields = Fields(values, str(path))
        targets = _names(fields, "target_modules")
        layers = _layers(fields)
        if not targets:
            raise CheckpointError(f"{path} has no target_modules, expected names of layers, a pattern or all-linear")
        if isinstance(targets, str) and layers is not None:
            raise CheckpointError(f"{path}: layers_to_transform needs a list of target_modules, not a pattern")
        if values.get("bias", "none") not in BIASES:
            raise fields.wrong("bias", f"one of {', '.join(BIASES)}")
        saved = _names(fields, "modules_to_save")
        if isinstance(saved, str):
            raise fields.wrong("modules_to_save", "a list of names")
        return cls(
            rank=fields.positive_int("r"),
            alpha=_number(fields, "lora_alpha", values.get("lora_alpha")),
            is_rank_stabilized=bool(values.get("use_rslora")),
            rank_pattern=_pattern(fields, "rank_pattern", int),
            alpha_pattern=_pattern(fields, "alpha_pattern", float),
            bias=values.get("bias", "none"),
            target_modules=targets,
            exclude_modules=_names(fields, "exclude_modules"),
            modules_to_save=saved,
            layers=layers,
            ties_weights=bool(values.get("ensure_weight_tying")),
            base_name=str(values.get("base_model_name_or_path") or ""),
        )

    def scale(self, rank: int, alpha: float) -> float:
        """What the product of a layer's two matrices is multiplied by. Source: arXiv 2106.09685; rsLoRA: 2312.03732"""
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def _refuse_others(values: Mapping[str, Any], path: Path) -> None:
    """Raises: CheckpointError, UnsupportedModelError"""
    kind = values.get("peft_type")
    if kind is None and _MLX_KEYS.intersection(values):
        raise mlx_adapter_error(path.parent)
    if kind is None:
        raise CheckpointError(f"{path} has no peft_type; it is not a config that peft wrote")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type {kind!r:.40} is not supported, only LORA; {_remedy()}")
    task = values.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedModelError(f"{path}: task_type {task!r:.40} is not supported, only CAUSAL_LM")
    for key, value in values.items():
        if key not in _NEUTRAL | _READ and value not in (None, False, "", [], {}):
            raise UnsupportedModelError(f"{path}: {key:.60} is not supported; {_remedy()}")
    start = values.get("init_lora_weights", True)
    if start not in _INITIALISATIONS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights {start!r:.40} changes the base model, too, which is not supported; convert the "
            "adapter with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _remedy() -> str:
    return "merge the adapter into its base model with peft's merge_and_unload, and save that"


def _names(fields: Fields, key: str) -> str | tuple[str, ...]:
    value = fields.values.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise fields.wrong(key, "a list of names")
    return tuple(value)


def _layers(fields: Fields) -> frozenset[int] | None:
    value = fields.values.get("layers_to_transform")
    if fields.values.get("layers_pattern") not in _LAYERS_PATTERNS:
        raise UnsupportedModelError(f"{fields.where}: layers_pattern is not supported, only 'layers'; {_remedy()}")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise fields.wrong("layers_to_transform", "a list of layers")
    return frozenset(layers)


def _pattern(fields: Fields, key: str, kind: type) -> dict[str, Any]:
    """Ranks or alphas by pattern."""
    patterns = fields.values.get(key) or {}
    if not isinstance(patterns, dict):
        raise fields.wrong(key, "an object")
    for pattern, value in patterns.items():
        if kind is int and (type(value) is not int or value < 1):
            raise CheckpointError(
                f"{fields.where}: {key} of {pattern:.60} is {value!r:.40}, expected a positive integer"
            )
        if kind is float:
            _number(fields, f"{key} of {pattern:.60}", value)
    return patterns


def _number(fields: Fields, what: str, value: Any) -> float:
    is_number = type(value) in (int, float) and math.isfinite(value)
    if not is_number:
        raise CheckpointError(f"{fields.where}: {what} is {value!r:.40}, expected a number")
    return float(value)
