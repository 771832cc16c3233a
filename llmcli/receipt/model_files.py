"""Which files of a model a text depends on."""

import re
from pathlib import Path

from llmcli.checkpoint.folder import CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from llmcli.checkpoint.model import Model

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")  # the first that is there is read
_SETTINGS_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATE_NAME = "chat_template.jinja"
_COMMIT = re.compile("[0-9a-f]{40}")


def model_files(model: Model, *, with_template: bool) -> dict[str, Path]:
    """The files by name: config, weights and their index, tokenizer, the chat template if it is used, adapters."""
    folder = model.checkpoint.folder
    weights = sorted({info.path for info in model.checkpoint.tensors.values()})
    names = [CONFIG_NAME, GENERATION_CONFIG_NAME]
    if not (folder / WEIGHTS_NAME).exists():
        names.append(INDEX_NAME)
    names += [name for name in TOKENIZER_NAMES if (folder / name).exists()][:1]
    names += _SETTINGS_NAMES
    if with_template:
        names.append(_TEMPLATE_NAME)
    files = {name: folder / name for name in names if (folder / name).exists()}
    files |= {path.name: path for path in weights}
    for number, adapter in enumerate(model.adapters, 1):
        files |= {f"adapter {number} {path.name}": path for path in adapter.files}
    return files


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds, None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if is_snapshot and _COMMIT.fullmatch(folder.name) else None
