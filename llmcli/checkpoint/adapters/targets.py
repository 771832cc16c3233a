"""Finds which layers of a model an adapter's config means, and the rank and scale of each, as peft finds them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmcli.checkpoint.adapters.config import ALL_LINEAR, LoraConfig
from llmcli.errors import CheckpointError
from llmcli.patterns import match_names


@dataclass(frozen=True)
class Target:
    """What is added to a layer: a product of rank `rank`, times `scale`."""

    rank: int
    scale: float


def find_targets(config: LoraConfig, linear: Collection[str], others: Collection[str], where: str) -> dict[str, Target]:
    """The layers that an adapter changes by products, by module name (`model.layers.0.mlp.up_proj`).

    `linear` are the linear layers inside the model, `others` what may be named beside them: the embedding and the head.
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
