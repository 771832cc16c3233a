"""Which files of a repository a model needs, no code among them; and what names from outside may look like."""

import re
from collections.abc import Collection
from pathlib import Path

from llmcli.checkpoint.folder import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    SHARD_NAME,
    WEIGHTS_NAME,
    refuse_adapter,
)
from llmcli.checkpoint.safetensors_file import listed, printable
from llmcli.errors import CheckpointError, TokenizerError, UnsupportedModelError
from llmcli.reading import CHAT_TEMPLATE, CONFIG, INDEX, TOKENIZER_MODEL, TOKENIZER_SETTINGS, SmallFile

# Checks every name that comes from outside before it becomes part of a path or an address.
#
# Names from outside are those that the hub sends (ETag, commit, file names) and the revision of a hub id. What does not
# fit its pattern is refused. The patterns are narrower than what a file system takes: no separators, no control
# characters, nothing that begins with a dot, and no ending by which the cache knows a file of its own.

_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_NAME = re.compile(r"\w[\w .,()+=@~-]*")
_REVISION_PART = re.compile(r"\w[\w.,()+=@#%!-]*")
_MAX_NAME_BYTES = 255
_NOT_A_HUB = "is HF_ENDPOINT a Hugging Face hub?"


def checked_etag(header: str | None, url: str) -> str:
    """The ETag of a file as huggingface_hub names its blob: without the mark of a weak one, and without quotes.

    Raises: CheckpointError.
    """
    etag = (header or "").lstrip("W/").strip('"')
    if not _ETAG.fullmatch(etag):
        raise CheckpointError(
            f"{url} comes with the ETag {printable(header)}, expected up to 128 letters, digits, - and _; {_NOT_A_HUB}"
        )
    return etag


def checked_commit(value: object, where: str) -> str:
    """A commit's hash. Raises: CheckpointError."""
    if not isinstance(value, str) or not _COMMIT.fullmatch(value):
        raise CheckpointError(
            f"{where} names the commit {printable(value)}, expected 40 hexadecimal digits; {_NOT_A_HUB}"
        )
    return value


def checked_revision(revision: str) -> str:
    """A branch, tag or commit as the user gives it, which names a file in the cache's refs.

    Raises: CheckpointError.
    """
    parts = revision.split("/")
    is_safe = all(_REVISION_PART.fullmatch(part) and ".." not in part for part in parts)
    if not is_safe or revision.endswith(".lock") or len(revision.encode()) > _MAX_NAME_BYTES:
        raise CheckpointError(f"{printable(revision)} is not a revision; expected a branch, a tag or a commit hash")
    return revision


def is_weights_name(name: object) -> bool:
    """Whether a name is that of a safetensors file next to config.json; those in subfolders are not opened."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and _FILE_NAME.fullmatch(name) is not None
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


SMALL_FILES: dict[str, SmallFile] = {
    CONFIG_NAME: CONFIG,
    GENERATION_CONFIG_NAME: CONFIG,
    INDEX_NAME: INDEX,
    "tokenizer.json": TOKENIZER_MODEL,
    "tokenizer.model": TOKENIZER_MODEL,
    "tokenizer_config.json": TOKENIZER_SETTINGS,
    "special_tokens_map.json": TOKENIZER_SETTINGS,
    "added_tokens.json": TOKENIZER_SETTINGS,
    "chat_template.jinja": CHAT_TEMPLATE,
    # Only there when the model is of a kind that opening the folder refuses by name.
    "adapter_config.json": CONFIG,
    "quantize_config.json": CONFIG,
    "quant_config.json": CONFIG,
    "hf_quant_config.json": CONFIG,
}
_TOKENIZERS = {"tokenizer.json", "tokenizer.model"}
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_MAX_NAMED = 3  # files named in one message


def weight_files(names: Collection[str], folder: Path) -> list[str]:
    """The weight files to have among `names`; none if these hold no whole model.

    The choice is that of opening a folder: model.safetensors, else the shards of the index, else a single file of
    another name. `folder` holds the index if `names` does.
    Raises: CheckpointError if the index is damaged, or names what opening a folder refuses.
    """
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME]
    if INDEX_NAME in names:
        return _shards(folder / INDEX_NAME)
    others = [name for name in names if is_weights_name(name) and not name.startswith("consolidated")]
    others = [name for name in others if not SHARD_NAME.search(name)]
    return others if len(others) == 1 else []


def _shards(index: Path) -> list[str]:
    weight_map = INDEX.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names; its upload is incomplete")
    for name, shard in weight_map.items():
        if not is_weights_name(shard):
            raise CheckpointError(
                f"{index} places {printable(name)} in {printable(shard)}, expected the name of a .safetensors file "
                "in the same folder; try another revision"
            )
    return sorted(set(weight_map.values()))


def is_complete(folder: Path) -> bool:
    """Whether a snapshot in the cache holds config, tokenizer and all weights.

    The other small files are not required: a repository may lack them, and the cache does not say so.
    """
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if path.is_file()}  # a broken link is not a file
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
    if CONFIG_NAME in names and any(name.endswith(".safetensors") for name in names):
        if not _TOKENIZERS.intersection(names):
            raise TokenizerError(f"{hub_id} has no tokenizer: neither {' nor '.join(sorted(_TOKENIZERS))}")
        return
    others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
    has = f", but {listed(others, _MAX_NAMED)}" if others else ""
    missing = "safetensors" if CONFIG_NAME in names else CONFIG_NAME
    raise UnsupportedModelError(
        f"{hub_id} has no {missing}{has}; expected a Hugging Face model with {CONFIG_NAME} and *.safetensors, "
        "look for the repository of the original model"
    )
