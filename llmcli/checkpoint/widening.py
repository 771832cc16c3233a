"""Reads weights as float32: plain ones, and quantized ones from their codes, scales and zero points."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.layout import WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import STORED_AS, widen
from llmcli.quantization.packing import unpack_rows, unpack_zero_points
from llmcli.quantization.schemes import WeightScheme

_HOST_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "I64": np.int64, **STORED_AS}

_FLOAT_BYTES = 4

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of one quantized layer; `zero_points` is None if the scheme is symmetric."""

    scheme: WeightScheme
    codes: TensorInfo
    scales: TensorInfo
    zero_points: TensorInfo | None


def widened(model: Model) -> Model:
    """The model as it lies in memory when all its weights are float32, to plan with; its tensors are in no file."""
    packed = model.tensors.packed
    plain: dict[str, TensorInfo] = {}
    for name, info in model.tensors.tensors.items():
        module = name.rpartition(".")[0]
        is_part = module in packed and not name.endswith(".bias")
        name, shape = (module + WEIGHT_SUFFIX, packed[module].shape) if is_part else (name, info.shape)
        num_bytes = _FLOAT_BYTES * math.prod(shape)
        plain[name] = replace(info, name=name, dtype="F32", shape=shape, num_bytes=num_bytes)
    return replace(model, tensors=replace(model.tensors, tensors=plain, packed={}))


def read_floats(info: TensorInfo, begin: int, end: int, reader: TensorReader) -> Floats:
    """Rows begin ... end - 1 of a plain tensor. Shapes: result [end - begin, ...].

    Raises: CheckpointError for read errors, NaN and infinity
    """
    values: Floats = widen(_rows(reader, info, begin, end), info.dtype)
    if not np.isfinite(values).all():
        raise not_finite(info)
    return values


def read_widened(layer: PackedTensors, begin: int, end: int, reader: TensorReader, weights: Floats) -> None:
    """Rows begin ... end - 1 of a quantized weight; zero points are packed by the 8 rows, where `begin` must lie.

    Shapes: weights [end - begin, input_size], contiguous, which is filled
    Raises: CheckpointError for read errors, NaN and infinity
    """
    num_rows, num_bits = end - begin, layer.scheme.num_bits
    scales = read_floats(layer.scales, begin, end, reader)
    zeros: npt.NDArray[Any] | int = layer.scheme.offset
    if layer.zero_points is not None:
        rows_per_word = 32 // num_bits
        words = _rows(reader, layer.zero_points, begin // rows_per_word, -(-end // rows_per_word))
        zeros = unpack_zero_points(words, num_bits, num_rows).astype(np.float32)[:, :, None]
    codes = unpack_rows(_rows(reader, layer.codes, begin, end), num_bits, weights.shape[1])
    grouped = weights.reshape(num_rows, scales.shape[1], -1)  # the same memory
    np.subtract(codes.reshape(grouped.shape), zeros, out=grouped, dtype=np.float32)
    grouped *= scales[:, :, None]


def check_shape(info: TensorInfo, shape: tuple[int, int], reader: TensorReader) -> None:
    """Refuse a stored weight_shape unlike the layer's. Raises: CheckpointError, also for read errors."""
    stored = _rows(reader, info, 0, info.shape[0])
    if tuple(stored.tolist()) != shape:
        raise CheckpointError(f"{info.name} is {stored.tolist()}, expected {list(shape)}; damaged export?")


def not_finite(info: TensorInfo) -> CheckpointError:
    """The error for a tensor with NaN or infinity."""
    return CheckpointError(
        f"{info.name} in {info.path.name} holds NaN or infinity, expected finite weights; the file is damaged or "
        "was exported from a broken run: download or export it again"
    )


def _rows(reader: TensorReader, info: TensorInfo, begin: int, end: int) -> npt.NDArray[Any]:
    """Rows of a tensor as they are stored. Shapes: result [end - begin, ...]."""
    rows: npt.NDArray[Any] = np.empty((end - begin, *info.shape[1:]), _HOST_DTYPES[info.dtype])
    reader.read_range_into(info, begin * (info.num_bytes // info.shape[0]), rows.data)
    return rows
