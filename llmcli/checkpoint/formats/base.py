"""What every format gives: the tensors that it expects of a layer, and the layer in our order.

Our order is that of compressed-tensors `pack-quantized`: a row of codes for each output, the first in the lowest bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.checkpoint.reader import TensorReader, not_finite, read_whole
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import widen
from llmcli.quantization.packing import reorder_rows
from llmcli.quantization.schemes import WeightScheme

Array = npt.NDArray[Any]


class Format(Protocol):
    """How the tensors of a quantized linear layer are named and laid out. A value: equal formats read alike."""

    @property
    def name(self) -> str:
        """What users call it."""

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight [output_size, input_size]."""

    def read(self, source: "LayerSource") -> "StoredLayer":
        """Read a layer and bring it into our layout; codes stay in the order of the inputs, whatever `input_order` is.

        Raises: CheckpointError for read errors, and for values that contradict one another
        """

    def read_order(self, source: "LayerSource") -> Array | None:
        """Read the `input_order` of the layer alone. Raises: as `read`"""


@dataclass(frozen=True)
class PackedLayer:
    """A quantized linear layer: scheme, the shape [output_size, input_size] of the weight it stands for, and format."""

    scheme: WeightScheme
    shape: tuple[int, int]
    format: Format

    def tensors(self, weight: ExpectedTensor) -> Iterator[ExpectedTensor]:
        """What stands for its weight."""
        return self.format.tensors(weight, self.scheme)


@dataclass(frozen=True)
class StoredLayer:
    """A layer in our order; weight = (code - zero_point) * scale.

    Shapes: packed int32 [output_size, words]; scales [output_size, groups], held as floats.STORED_AS[scale_dtype];
            zero_points uint8 [output_size, groups], None for a symmetric scheme; input_order int64 [input_size]: the
            input that code i of every row belongs to once the codes are sorted, None if it is input i
    """

    packed: Array
    scales: Array
    scale_dtype: str
    zero_points: Array | None
    input_order: Array | None = None

    def group_index(self, layer: PackedLayer) -> Array:
        """The group of each input. Shapes: result int32 [input_size]"""
        num_inputs = layer.shape[1]
        groups = (np.arange(num_inputs) // (layer.scheme.group_size or num_inputs)).astype(np.int32)
        index = np.empty_like(groups)
        index[slice(None) if self.input_order is None else self.input_order] = groups
        return index


@dataclass(frozen=True)
class LayerSource:
    """Where a layer's tensors are read from: those of the model by name."""

    module: str
    layer: PackedLayer
    infos: Mapping[str, TensorInfo]
    reader: TensorReader

    def info(self, part: str) -> TensorInfo:
        """The tensor of that name in the module."""
        return self.infos[f"{self.module}.{part}"]

    def read(self, part: str) -> Array:
        """The tensor of that name in the module, as it is stored."""
        return read_whole(self.info(part), self.reader)

    def read_scales(self, part: str) -> tuple[Array, str]:
        """Scales as they are stored, and their type. Raises: CheckpointError for NaN and infinity, too"""
        info, scales = self.info(part), self.read(part)
        if not np.isfinite(widen(scales, info.dtype)).all():
            raise not_finite(info)
        return scales, info.dtype


def read_layer(module: str, layer: PackedLayer, infos: Mapping[str, TensorInfo], reader: TensorReader) -> StoredLayer:
    """A layer of a model in our order, codes sorted by `input_order`; `infos` are the model's tensors.

    Raises: as `read_stored`
    """
    stored = read_stored(module, layer, infos, reader)
    if stored.input_order is None:
        return stored
    return replace(stored, packed=reorder_rows(stored.packed, layer.scheme.num_bits, stored.input_order))


def read_stored(module: str, layer: PackedLayer, infos: Mapping[str, TensorInfo], reader: TensorReader) -> StoredLayer:
    """The same with the codes in the order of the inputs.

    Raises: CheckpointError for read errors, NaN and infinity, and for values that contradict one another
    """
    return layer.format.read(LayerSource(module, layer, infos, reader))


def read_orders(
    layers: Mapping[str, PackedLayer], infos: Mapping[str, TensorInfo], reader: TensorReader
) -> dict[str, Array]:
    """The `input_order` of each layer that has one, by module name; `infos` are the model's tensors.

    Raises: as `read_layer`
    """
    orders = {
        module: layer.format.read_order(LayerSource(module, layer, infos, reader)) for module, layer in layers.items()
    }
    return {module: order for module, order in orders.items() if order is not None}


def input_order(
    source: LayerSource, part: str, is_declared: bool | None, *, may_be_unset: bool = False
) -> Array | None:
    """The order in which the inputs of a layer fall into groups of neighbours, from the group that each belongs to.

    `is_declared` is what the config says: that inputs were ordered, that they were not, or nothing. With `may_be_unset`
    an index of -1 throughout means that they were not.
    Raises: CheckpointError where the groups contradict it, or are not of equal size
    """
    groups, (_, num_inputs), scheme = source.read(part), source.layer.shape, source.layer.scheme
    size = scheme.group_size or num_inputs
    if np.array_equal(groups, np.arange(num_inputs) // size) or (may_be_unset and (groups == -1).all()):
        return None
    where = f"{source.info(part).name} in {source.info(part).path.name}"
    num_groups = scheme.num_groups(num_inputs)
    if groups.min() < 0 or groups.max() >= num_groups:
        wrong = groups[(groups < 0) | (groups >= num_groups)][0]
        raise CheckpointError(
            f"{where} names group {wrong}, expected 0 to {num_groups - 1}: the order of the inputs is not known; "
            "download the model again"
        )
    if is_declared is False:
        raise CheckpointError(
            f"{where} orders the inputs, and config.json says that they are not ordered (desc_act, actorder); "
            "one of them is wrong: download the model again"
        )
    if (np.bincount(groups, minlength=num_groups) != size).any():
        raise CheckpointError(
            f"{where} has groups of other sizes, expected {num_groups} of {size} inputs; download the model again"
        )
    order: Array = np.argsort(groups, kind="stable")
    return order
