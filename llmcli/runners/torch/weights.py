"""Reads weights into torch tensors, one at a time in the order of the files, each checked for NaN."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmcli.checkpoint.formats import PackedLayer, StoredLayer, read_layer
from llmcli.checkpoint.layout import WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader, not_finite
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.runners.torch.huge_pages import empty_weight
from llmcli.runners.torch.packed_weight import PackedWeight

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Elements read and converted at a time: the buffer stays in the cache and touches few pages that are not kept.
CONVERSION_ELEMENTS = 2**20

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True)
class OrderedWeight:
    """A quantized weight. `input_order` has the input that column i belongs to; None if that is input i.

    Shapes: input_order int64 [input_size], or None
    """

    weight: PackedWeight
    input_order: Tensor | None


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of a model: plain tensors and widened 8-bit floats by name, layers of codes by module name."""

    plain: dict[str, Tensor]
    packed: dict[str, OrderedWeight]


def read_weights(model: Model, dtype: torch.dtype, on_progress: OnProgress) -> LoadedWeights:
    """Every weight the model uses, plain ones in `dtype`, read in the order of the files.

    Raises: CheckpointError for read errors, NaN and infinity, and layers whose tensors contradict one another
    """
    tensors = model.tensors
    infos, sources = tensors.tensors, tensors.sources
    total = sum(info.num_bytes for info in infos.values())
    read = 0
    weights = LoadedWeights({}, {})
    with TensorReader() as reader:
        for source, parts in sources.items():
            if source in tensors.packed:
                layer = tensors.packed[source]
                weights.packed[source] = _as_tensors(layer, read_layer(source, layer, infos, reader))
            elif source in tensors.scaled:
                scaled = tensors.scaled[source]
                weight = weights.plain[source + WEIGHT_SUFFIX] = empty_weight(scaled.shape, dtype)
                for begin, rows in scaled.read(source, infos, reader):
                    weight[begin : begin + len(rows)] = torch.from_numpy(rows)
            else:
                weights.plain[source] = _read_tensor(reader, infos[source], dtype)
                _check_finite(weights.plain[source], infos[source])
            read += sum(info.num_bytes for info in parts)
            on_progress(read, total)
    return weights


def _as_tensors(layer: PackedLayer, stored: StoredLayer) -> OrderedWeight:
    """The same memory as tensors. Scales keep their type: their rounding is part of the quantization."""
    scales = stored.scales.view(np.int16) if stored.scale_dtype == "BF16" else stored.scales
    weight = PackedWeight(
        layer.scheme,
        layer.shape,
        torch.from_numpy(stored.packed.view(np.uint8)),
        torch.from_numpy(scales).view(STORED_DTYPES[stored.scale_dtype]),
        None if stored.zero_points is None else torch.from_numpy(stored.zero_points),
    )
    return OrderedWeight(weight, None if stored.input_order is None else torch.from_numpy(stored.input_order))


def _read_tensor(reader: TensorReader, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read straight into the tensor that is kept; where the type differs, piece by piece through a small buffer."""
    weight = empty_weight(info.shape, dtype)
    stored_dtype = STORED_DTYPES[info.dtype]
    if stored_dtype == dtype:
        reader.read_tensor_into(info, _bytes_of(weight))
        return weight
    flat = weight.view(-1)
    piece = torch.empty(min(CONVERSION_ELEMENTS, flat.numel()), dtype=stored_dtype)
    for begin in range(0, flat.numel(), CONVERSION_ELEMENTS):
        part = piece[: min(CONVERSION_ELEMENTS, flat.numel() - begin)]
        reader.read_range_into(info, begin * part.itemsize, _bytes_of(part))
        flat[begin : begin + part.numel()] = part
    return weight


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes, since numpy has no bfloat16."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _check_finite(weight: Tensor, info: TensorInfo) -> None:
    smallest, largest = torch.aminmax(weight)  # one pass, no temporary; NaN wins over every number
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        raise not_finite(info)
