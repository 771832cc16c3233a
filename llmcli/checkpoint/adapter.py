"""LoRA adapters in PEFT's layout: their config, their files, and which layers of a base model they change."""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.checkpoint.folder import ADAPTER_CONFIG_NAME, MLX_ADAPTER_NAME, SourceState, mlx_adapter_error
from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.checkpoint.safetensors_file import TensorInfo, read_header
from llmcli.config.fields import Fields
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.patterns import match_names
from llmcli.reading import CONFIG

# `LoraConfig`: what an adapter_config.json says. Refuses by name what is not plain LoRA of a text generator.
#
# Source: peft 0.21, `LoraConfig`; a key means here what it means there.

ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")

# Keys about how an adapter was made or where it is to run, not about its mathematics. `fan_in_fan_out` is for layers
# that store their weights transposed, which these models do not have; peft ignores it there, too.
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
# Initialisations that change only the adapter's own weights; the others change the base model's, too.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
_REMEDY = "merge the adapter into its base model with peft's merge_and_unload, and save that"
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
        """The factor of the product of a layer's two matrices. Source: arXiv 2106.09685; rsLoRA: 2312.03732"""
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def _refuse_others(values: Mapping[str, Any], path: Path) -> None:
    """Raises: CheckpointError, UnsupportedModelError"""
    kind = values.get("peft_type")
    if kind is None and _MLX_KEYS.intersection(values):
        raise mlx_adapter_error(path.parent)
    if kind is None:
        raise CheckpointError(f"{path} has no peft_type; it is not a config that peft wrote")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type {kind!r:.40} is not supported, only LORA; {_REMEDY}")
    task = values.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedModelError(f"{path}: task_type {task!r:.40} is not supported, only CAUSAL_LM")
    for key, value in values.items():
        if key not in _NEUTRAL | _READ and value not in (None, False, "", [], {}):
            raise UnsupportedModelError(f"{path}: {key:.60} is not supported; {_REMEDY}")
    start = values.get("init_lora_weights", True)
    if start not in _INITIALISATIONS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights {start!r:.40} changes the base model, too, which is not supported; convert the "
            "adapter with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


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
        raise UnsupportedModelError(f"{fields.where}: layers_pattern is not supported, only 'layers'; {_REMEDY}")
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


# `Adapter`: a folder with a LoRA adapter as peft writes it; its files are checked, not yet against a base model.

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_ADAPTER_NAME = "adapter_model.bin"


@dataclass(frozen=True)
class Adapter:
    """An adapter, scaled by `weight`. `name` is as the user gave it: a folder or a hub id.

    `state` is the state of the folder before anything in it was opened.
    """

    name: str
    weight: float
    folder: Path
    config: LoraConfig
    tensors: Mapping[str, TensorInfo]
    state: SourceState

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that its effect depends on."""
        return self.folder / ADAPTER_CONFIG_NAME, self.folder / ADAPTER_WEIGHTS_NAME

    @property
    def sha256(self) -> str:
        """The hash of its weights file. Raises: CheckpointError"""
        path = self.folder / ADAPTER_WEIGHTS_NAME
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk") from error

    @property
    def shown_name(self) -> str:
        """The hub id, or the folder's own name; with the weight where it is not 1."""
        name = self.name if find_hub_id(self.name) else self.folder.resolve().name
        return name if self.weight == 1 else f"{name} x {self.weight:g}"


def open_adapter(folder: Path, name: str, weight: float = 1.0) -> Adapter:
    """Check the files of an adapter.

    Raises: CheckpointError if the folder is missing, incomplete or damaged; UnsupportedModelError for what is not a
    LoRA adapter that this program adds
    """
    try:
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, expected the adapter's folder; give {folder.parent}")
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"adapter folder {folder} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:  # a NUL in the path
        raise CheckpointError(f"adapter folder {str(folder)!r} is not a valid path: {error}") from error
    require_adapter_files(folder, names)
    state = SourceState.record(folder)
    config = LoraConfig.load(folder / ADAPTER_CONFIG_NAME)
    return Adapter(name, weight, folder, config, read_header(folder / ADAPTER_WEIGHTS_NAME), state)


def require_adapter_files(where: object, names: set[str] | frozenset[str]) -> None:
    """Refuse a folder or repository `where` whose files `names` do not hold an adapter in safetensors.

    Raises: CheckpointError, UnsupportedModelError
    """
    if ADAPTER_CONFIG_NAME not in names:
        what = "a model, expected an adapter" if "config.json" in names else "not an adapter"
        raise CheckpointError(f"{where} is {what}: it has no {ADAPTER_CONFIG_NAME}; give the folder that peft wrote")
    if ADAPTER_WEIGHTS_NAME in names:
        return
    if MLX_ADAPTER_NAME in names:
        raise mlx_adapter_error(where)
    if PICKLED_ADAPTER_NAME in names:
        raise UnsupportedModelError(
            f"{where} holds its weights as a PyTorch pickle ({PICKLED_ADAPTER_NAME}), which is not supported; "
            f"save the adapter again with a current peft, which writes {ADAPTER_WEIGHTS_NAME}"
        )
    raise CheckpointError(f"{where} has no {ADAPTER_WEIGHTS_NAME}; incomplete download?")


# Finds which layers of a model an adapter's config means, and the rank and scale of each, as peft finds them.


@dataclass(frozen=True)
class Target:
    """What is added to a layer: a product of rank `rank`, times `scale`."""

    rank: int
    scale: float


def find_targets(config: LoraConfig, linear: Collection[str], others: Collection[str], where: str) -> dict[str, Target]:
    """The layers that an adapter changes by products, by module name (`model.layers.0.mlp.up_proj`).

    `linear` are the linear layers inside the model, `others` the embedding and the head, which may be named too.
    Raises: CheckpointError if the config matches no layer, or has patterns that `match_names` refuses
    """
    modules = [*linear, *others]
    matched = _match(config, modules, where)
    targets = {}
    for module in modules:
        if _is_excluded(config, module, matched) or not _is_targeted(config, module, module in linear, matched):
            continue
        rank = next((rank for key, rank in config.rank_pattern.items() if module in matched[_ending(key)]), config.rank)
        alpha = next(
            (alpha for key, alpha in config.alpha_pattern.items() if module in matched[_ending(key)]), config.alpha
        )
        targets[module] = Target(rank, config.scale(rank, alpha))
    if not targets and not config.modules_to_save:
        raise CheckpointError(
            f"{where}: target_modules match no layer of the model; is it the adapter of another model?"
        )
    return targets


def is_saved(config: LoraConfig, module: str) -> bool:
    """Whether `modules_to_save` names a module, or one that it is part of, by the end of its name."""
    parts = module.split(".")
    ancestors = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(ancestor.endswith(name) for ancestor in ancestors for name in config.modules_to_save)


def _match(config: LoraConfig, modules: list[str], where: str) -> Mapping[str, set[str]]:
    """The modules that each pattern of the config matches, all patterns in one go."""
    patterns = [_ending(key) for key in (*config.rank_pattern, *config.alpha_pattern)]
    patterns += [
        _whole(pattern)
        for pattern in (config.target_modules, config.exclude_modules)
        if isinstance(pattern, str) and pattern.lower() != ALL_LINEAR
    ]
    return match_names(list(dict.fromkeys(patterns)), modules, f"{where}:", CheckpointError)


def _ending(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _whole(pattern: str) -> str:
    return rf"(?:{pattern})\Z"


def _is_excluded(config: LoraConfig, module: str, matched: Mapping[str, set[str]]) -> bool:
    if is_saved(config, module):
        return True
    if isinstance(config.exclude_modules, str):
        return module in matched[_whole(config.exclude_modules)]
    return _is_listed(module, config.exclude_modules)


def _is_targeted(config: LoraConfig, module: str, is_linear: bool, matched: Mapping[str, set[str]]) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        return is_linear if targets.lower() == ALL_LINEAR else module in matched[_whole(targets)]
    if not _is_listed(module, targets):
        return False
    return config.layers is None or _layer_of(module) in config.layers


def _is_listed(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer_of(module: str) -> int | None:
    """The layer's number in `model.layers.0.mlp.up_proj`; None outside the layers."""
    return next((int(part) for part in module.split(".") if part.isdecimal()), None)
