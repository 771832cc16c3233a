"""Which files of a repository a model needs: JSON files, tokenizer, safetensors; no code, no second copies."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmcli.checkpoint.folder import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    refuse_adapter,
    refuse_quantization_files,
)
from llmcli.errors import CheckpointError, TokenizerError, UnsupportedModelError

SMALL_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    # Only there when the model is of a kind that opening the folder refuses by name.
    "adapter_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)
_TOKENIZERS = {"tokenizer.json", "tokenizer.model"}
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")
_MAX_NAMED = 3  # files named in one message


def weight_files(names: Collection[str], folder: Path) -> list[str]:
    """The weight files to have, of the files `names`; none if they hold no choice that is a whole model.

    The choice is that of opening a folder: model.safetensors, else the shards of the index, else a single file of
    another name. `folder` holds the index if `names` does.
    Raises: CheckpointError if the index is damaged.
    """
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME]
    if INDEX_NAME in names:
        weight_map = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map; remove the model and download it again")
        return sorted({str(shard) for shard in weight_map.values()})
    others = [name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated")]
    others = [name for name in others if "/" not in name and not _SHARD_NAME.search(name)]
    return others if len(others) == 1 else []


def is_complete(folder: Path) -> bool:
    """Whether a snapshot in the cache holds config, tokenizer and all weights.

    The other small files are not asked for: a repository may not have them, which the cache does not tell.
    """
    names = {path.name for path in folder.iterdir() if path.exists()}  # a broken link does not exist
    try:
        weights = weight_files(names, folder)
    except CheckpointError:
        return False
    return CONFIG_NAME in names and bool(names & _TOKENIZERS) and bool(weights) and names.issuperset(weights)


def refuse_repository(hub_id: object, names: Collection[str]) -> None:
    """Refuse, by its file names alone, what would be refused once all of it is here.

    Raises: UnsupportedModelError, for no config.json or safetensors naming the weights it has instead;
    TokenizerError without a tokenizer.
    """
    refuse_adapter(hub_id, names)
    refuse_quantization_files(hub_id, names)
    if CONFIG_NAME in names and any(name.endswith(".safetensors") for name in names):
        if not _TOKENIZERS.intersection(names):
            raise TokenizerError(f"{hub_id} has no tokenizer: neither {' nor '.join(sorted(_TOKENIZERS))}")
        return
    others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    has = f", but {', '.join(others[:_MAX_NAMED])}{more}" if others else ""
    missing = "safetensors" if CONFIG_NAME in names else CONFIG_NAME
    raise UnsupportedModelError(
        f"{hub_id} has no {missing}{has}; expected a Hugging Face model with {CONFIG_NAME} and *.safetensors, "
        "look for the repository of the original model"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the cache that must hold an object.

    Raises: CheckpointError.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON; remove the model and download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; remove the model and download it again")
    return value
