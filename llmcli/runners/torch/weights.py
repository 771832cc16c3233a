"""Reads weights into torch tensors, one at a time in the order of the files, each checked for NaN."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmcli.checkpoint.matching import PackedLayer
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.widening import not_finite
from llmcli.errors import CheckpointError
from llmcli.quantization.packing import unpack_zero_points
from llmcli.runners.torch.packed_weight import PackedWeight

INTEGER_DTYPES = {"I32": torch.int32, "I64": torch.int64}
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_SUFFIX = ".weight_scale"

# Elements read and converted at a time: the buffer stays in the cache, and every page touched is one that is kept.
CONVERSION_ELEMENTS = 2**20

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


def read_weights(model: Model, dtype: torch.dtype, on_progress: OnProgress) -> dict[str, Tensor]:
    """Every tensor the model uses, in `dtype`, read in the order of the files."""
    infos = model.tensors.tensors
    in_file_order = sorted(infos, key=lambda name: (infos[name].path, infos[name].offset))
    total = sum(info.num_bytes for info in infos.values())
    read = 0
    weights: dict[str, Tensor] = {}
    with TensorReader() as reader:
        for name in in_file_order:
            info = infos[name]
            if info.dtype in INTEGER_DTYPES:
                weights[name] = _read_as_stored(reader, info)
            else:
                # Scales keep their type: what they were rounded to is part of the quantization.
                weights[name] = _read_tensor(
                    reader, info, STORED_DTYPES[info.dtype] if name.endswith(SCALE_SUFFIX) else dtype
                )
                _check_finite(weights[name], info)
            read += infos[name].num_bytes
            on_progress(read, total)
    return weights


def _read_tensor(reader: TensorReader, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read straight into the tensor that is kept; where the type differs, piece by piece through a small buffer."""
    weight = torch.empty(info.shape, dtype=dtype)
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


def _read_as_stored(reader: TensorReader, info: TensorInfo) -> Tensor:
    """An integer tensor, unchanged."""
    tensor = torch.empty(info.shape, dtype=INTEGER_DTYPES[info.dtype])
    reader.read_tensor_into(info, _bytes_of(tensor))
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; numpy has no bfloat16, so it is seen as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _check_finite(weight: Tensor, info: TensorInfo) -> None:
    smallest, largest = torch.aminmax(weight)  # one pass, no temporary; NaN wins over every number
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        raise not_finite(info)


def take_packed_weight(weights: dict[str, Tensor], name: str, layer: PackedLayer) -> PackedWeight:
    """The parts of a quantized layer, taken out of `weights` so that their memory goes where they go.

    Raises: CheckpointError if the stored shape is not the layer's.
    """
    codes, scales, shape = (weights.pop(f"{name}.weight_{part}") for part in ("packed", "scale", "shape"))
    if tuple(shape.tolist()) != layer.shape:
        raise CheckpointError(f"{name}.weight_shape is {shape.tolist()}, expected {list(layer.shape)}; damaged export?")
    zero_points = None
    if not layer.scheme.is_symmetric:
        packed = weights.pop(f"{name}.weight_zero_point").numpy()
        unpacked = unpack_zero_points(packed, layer.scheme.num_bits, layer.shape[0])
        zero_points = torch.from_numpy(unpacked.copy())
    return PackedWeight(layer.scheme, layer.shape, codes.view(torch.uint8), scales, zero_points)
