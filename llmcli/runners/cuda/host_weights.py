"""Reads and converts on the host: norms, biases, and codes that become floats.

Every reading function fills its last argument, an array in pinned memory, and may run in any thread.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import Fp8Layer
from llmcli.checkpoint.reader import Floats, TensorReader, read_floats
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.translation import PackedTensors, read_widened
from llmcli.kernels.tiles import HALF_ROWS
from llmcli.runners.cuda.weight_layout import Linear

Buffer = npt.NDArray[np.uint8]


def read_bytes(info: TensorInfo, begin: int, reader: TensorReader, buffer: Buffer) -> None:
    """Read the tensor's bytes from `begin` on, unconverted. Raises: CheckpointError for read errors."""
    reader.read_range_into(info, begin, buffer.data)


def read_norm(info: TensorInfo, reader: TensorReader, values: Floats) -> None:
    """Read a norm as float32. Raises: CheckpointError for read errors, NaN and infinity."""
    values[:] = read_floats(info, 0, info.shape[0], reader)


def read_bias(biases: Sequence[tuple[Linear, TensorInfo]], reader: TensorReader, values: Floats) -> None:
    """Read the biases of one matrix as float32, each at the index of its layer's outputs; zeros between them.

    Raises: CheckpointError for read errors, NaN and infinity
    """
    halves = values.reshape(-1, HALF_ROWS)
    halves[:] = 0
    for linear, info in biases:
        bias = read_floats(info, 0, info.shape[0], reader)
        padded = np.zeros((-(-len(bias) // HALF_ROWS), HALF_ROWS), np.float32)
        padded.reshape(-1)[: len(bias)] = bias
        halves[linear.first_half :: linear.half_step][: len(padded)] = padded


def read_unpacked(
    layer: PackedTensors, order: bytes | None, begin: int, end: int, reader: TensorReader, buffer: Buffer
) -> None:
    """Read rows begin ... end - 1 of a quantized weight as float32; `begin` is the start of a tile.

    `order`, as in `MatrixFormat`, is that of the stored columns; each is moved to its input's index.
    Raises: CheckpointError for read errors, NaN and infinity
    """
    weights = buffer.view(np.float32).reshape(end - begin, -1)
    if order is None:
        read_widened(layer, begin, end, reader, weights)
    else:
        sorted_weights = np.empty_like(weights)
        read_widened(layer, begin, end, reader, sorted_weights)
        weights[:, np.frombuffer(order, np.int32)] = sorted_weights


def read_fp8(
    layer: Fp8Layer,
    module: str,
    infos: Mapping[str, TensorInfo],
    begin: int,
    end: int,
    reader: TensorReader,
    buffer: Buffer,
) -> None:
    """Read rows begin ... end - 1 of 8-bit floats as float32. Raises: as `read_unpacked`."""
    buffer.view(np.float32).reshape(end - begin, -1)[:] = layer.read_rows(module, infos, begin, end, reader)


def read_fp8_scales(
    layer: Fp8Layer,
    scale_rows: int,
    module: str,
    infos: Mapping[str, TensorInfo],
    begin: int,
    end: int,
    reader: TensorReader,
    buffer: Buffer,
) -> None:
    """Read the scales of rows begin, begin + scale_rows, ... as they are stored.

    Raises: CheckpointError for read errors
    """
    scales = layer.read_scales(module, infos, begin, end, reader)[::scale_rows]
    buffer.view(scales.dtype).reshape(scales.shape)[:] = scales
