"""`Adapter`: a folder with a LoRA adapter as peft writes it; its files are checked, not yet against a base model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.checkpoint.adapters.config import ADAPTER_CONFIG_NAME, LoraConfig
from llmcli.checkpoint.folder import MLX_ADAPTER_NAME, SourceState, mlx_adapter_error
from llmcli.checkpoint.hub_id import find_hub_id
from llmcli.checkpoint.safetensors_file import TensorInfo, read_header
from llmcli.errors import CheckpointError, UnsupportedModelError

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_ADAPTER_NAME = "adapter_model.bin"


@dataclass(frozen=True)
class Adapter:
    """An adapter whose product counts `weight` times. `name` is as the user gave it: a folder or a hub id.

    `state` is what the folder was like before anything in it was opened.
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
        """Of the file with its weights. Raises: CheckpointError"""
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
