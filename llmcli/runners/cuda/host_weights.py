"""Reads and converts on the host: norms, biases, and codes that become floats.

Every reading function fills its last argument, an array in pinned memory, and may run in any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.kernels.tiles import HALF_ROWS
from llmcli.quantization.floats import STORED_AS, widen
from llmcli.quantization.packing import unpack_rows, unpack_zero_points
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.cuda.weight_layout import Linear

_HOST_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "I64": np.int64, **STORED_AS}

Buffer = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of one quantized layer; `zero_points` is None if the scheme is symmetric."""

    scheme: WeightScheme
    codes: TensorInfo
    scales: TensorInfo
    zero_points: TensorInfo | None


def read_bytes(info: TensorInfo, begin: int, reader: TensorReader, buffer: Buffer) -> None:
    """Read the tensor's bytes from `begin` on, unconverted. Raises: CheckpointError for read errors."""
    reader.read_range_into(info, begin, buffer.data)


def read_norm(info: TensorInfo, reader: TensorReader, values: Floats) -> None:
    """Read a norm as float32. Raises: CheckpointError for read errors, NaN and infinity."""
    values[:] = _floats(reader, info, 0, info.shape[0])


def read_bias(biases: Sequence[tuple[Linear, TensorInfo]], reader: TensorReader, values: Floats) -> None:
    """Read the biases of one matrix as float32, each at the place of its layer's outputs; zeros between them.

    Raises: CheckpointError for read errors, NaN and infinity
    """
    halves = values.reshape(-1, HALF_ROWS)
    halves[:] = 0
    for linear, info in biases:
        bias = _floats(reader, info, 0, info.shape[0])
        padded = np.zeros((-(-len(bias) // HALF_ROWS), HALF_ROWS), np.float32)
        padded.reshape(-1)[: len(bias)] = bias
        halves[linear.first_half :: linear.half_step][: len(padded)] = padded


def read_unpacked(layer: PackedTensors, begin: int, end: int, reader: TensorReader, buffer: Buffer) -> None:
    """Read rows begin ... end - 1 of a quantized weight as float32; `begin` is the start of a tile.

    Raises: CheckpointError for read errors, NaN and infinity
    """
    num_rows, num_bits = end - begin, layer.scheme.num_bits
    weights = buffer.view(np.float32).reshape(num_rows, -1)  # [num_rows, num_inputs]
    scales = _floats(reader, layer.scales, begin, end)
    zeros: npt.NDArray[Any] | int = layer.scheme.offset
    if layer.zero_points is not None:
        rows_per_word = 32 // num_bits
        words = _rows(reader, layer.zero_points, begin // rows_per_word, -(-end // rows_per_word))
        zeros = unpack_zero_points(words, num_bits, num_rows).astype(np.float32)[:, :, None]
    codes = unpack_rows(_rows(reader, layer.codes, begin, end), num_bits, weights.shape[1]).astype(np.float32)
    grouped = codes.reshape(num_rows, scales.shape[1], -1) - zeros
    weights[:] = (grouped * scales[:, :, None]).reshape(weights.shape)


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


def _floats(reader: TensorReader, info: TensorInfo, begin: int, end: int) -> Floats:
    values: Floats = widen(_rows(reader, info, begin, end), info.dtype)
    if not np.isfinite(values).all():
        raise not_finite(info)
    return values
