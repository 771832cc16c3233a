"""Opens a model folder as one value: its files checked, its config read, its tensors matched by name and shape."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llmcli.checkpoint.adapters.folder import Adapter
from llmcli.checkpoint.folder import Checkpoint, open_checkpoint, quantization_of
from llmcli.checkpoint.formats import Array, read_orders
from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.matching import ModelTensors, match_tensors
from llmcli.checkpoint.reader import TensorReader
from llmcli.config.llama import LlamaConfig
from llmcli.quantization.methods import notes_of


@dataclass(frozen=True)
class Model:
    """A model folder that passed every check that needs no weights. `notes` are sentences that users should know.

    `adapters` are those that its tensors have been changed by.
    """

    checkpoint: Checkpoint
    config: LlamaConfig
    tensors: ModelTensors
    notes: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def input_orders(self) -> Mapping[str, Array]:
        """The input that each column of a layer belongs to once its codes are sorted, by module name; read once.

        Layers whose groups are of neighbours are not in it.
        Shapes: int64 [input_size]
        Raises: CheckpointError for read errors, and for an order that contradicts something
        """
        with TensorReader() as reader:
            return read_orders(self.tensors.packed, self.tensors.tensors, reader)


def open_model(folder: Path) -> Model:
    """Open and check a Hugging Face model folder.

    Raises: CheckpointError or a subclass, for everything that can be wrong with the folder but the weights' values.
    """
    checkpoint = open_checkpoint(folder)
    where = str(folder / "config.json")
    config = LlamaConfig.from_dict(checkpoint.config_json, where)
    quantization = quantization_of(checkpoint.config_json, where)
    tensors = match_tensors(config, checkpoint.tensors, str(folder), quantization)
    if config.tie_word_embeddings and tensors.head in tensors.tensors and tensors.head != EMBEDDING:
        tensors = _share_equal_head(tensors)
    return Model(checkpoint, config, tensors, (*config.notes, *notes_of(quantization)))


def num_parameters(model: Model) -> int:
    """Weights of a model, a matrix that serves as embedding and as head counted once."""
    layers = model.tensors.quantized
    plain = (
        info
        for name, info in model.tensors.tensors.items()
        if name.rpartition(".")[0] not in layers or name.endswith(".bias")
    )
    return sum(math.prod(info.shape) for info in plain) + sum(math.prod(layer.shape) for layer in layers.values())


def _share_equal_head(tensors: ModelTensors) -> ModelTensors:
    """A tied model that stores both matrices: one buffer serves if they are equal, else the stored head counts."""
    embedding, head = tensors.tensors[EMBEDDING], tensors.tensors[tensors.head]
    with TensorReader() as reader:
        if not reader.is_equal(embedding, head):
            return tensors
    used = {name: info for name, info in tensors.tensors.items() if info is not head}
    return replace(tensors, tensors=used, head=EMBEDDING)
