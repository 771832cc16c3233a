"""Reads tensors, or rows of them, into arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import STORED_AS, widen

Floats = npt.NDArray[np.float32]

_HOST_DTYPES: dict[str, type[np.generic]] = {
    "F8_E4M3": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    **STORED_AS,
}


def read_rows(info: TensorInfo, begin: int, end: int, reader: TensorReader) -> npt.NDArray[Any]:
    """Rows begin ... end - 1 of a tensor as they are stored. Shapes: result [end - begin, ...].

    Raises: CheckpointError for read errors
    """
    rows: npt.NDArray[Any] = np.empty((end - begin, *info.shape[1:]), _HOST_DTYPES[info.dtype])
    reader.read_range_into(info, begin * (info.num_bytes // info.shape[0]), rows.data)
    return rows


def read_whole(info: TensorInfo, reader: TensorReader) -> npt.NDArray[Any]:
    """A whole tensor as it is stored. Raises: CheckpointError for read errors"""
    values: npt.NDArray[Any] = np.empty(info.shape, _HOST_DTYPES[info.dtype])
    reader.read_tensor_into(info, values.data)
    return values


def read_floats(info: TensorInfo, begin: int, end: int, reader: TensorReader) -> Floats:
    """Rows begin ... end - 1 of a plain tensor. Shapes: result [end - begin, ...].

    Raises: CheckpointError for read errors, NaN and infinity
    """
    values: Floats = widen(read_rows(info, begin, end, reader), info.dtype)
    if not np.isfinite(values).all():
        raise not_finite(info)
    return values


def not_finite(info: TensorInfo) -> CheckpointError:
    """The error for a tensor with NaN or infinity."""
    return CheckpointError(
        f"{info.name} in {info.path.name} holds NaN or infinity, expected finite weights; the file is damaged or "
        "was exported from a broken run: download or export it again"
    )
