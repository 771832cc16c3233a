"""Model folders of tensors filled with one value each, and their refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from llmcli.checkpoint.folder import open_checkpoint
from llmcli.checkpoint.reader import TensorReader
from llmcli.errors import CheckpointError


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def save(path: Path, **values: float) -> None:
    """A safetensors file of tensors of two elements each."""
    safetensors.torch.save_file(
        {name: torch.full((2,), value, dtype=torch.float32) for name, value in values.items()}, path
    )


def read_values(folder: Path) -> dict[str, float]:
    """The value that fills each tensor of the folder."""
    values = {}
    with TensorReader() as reader:
        for name, info in open_checkpoint(folder).tensors.items():
            tensor = torch.zeros(info.shape)
            reader.read_tensor_into(info, tensor.numpy())
            values[name] = tensor[0].item()
    return values


def refusal(path: Path, read: Callable[[Path], object] = open_checkpoint) -> str:
    """The one-line refusal of a folder, or of a file that is read by something else."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.isprintable()
    assert str(path) in message
    return message
