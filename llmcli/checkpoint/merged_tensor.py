"""`MergedTensor`: a tensor of a model to which adapters add something while it is read; `Merger` computes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import LARGEST_ROUNDED, STORED_AS, Array, round_nearest, widen

# Sums are computed by whole blocks of rows, whatever part is asked for: so a weight's bits do not depend on how it is
# cut for reading. Blocks are 96 KiB of floats: from 128 KiB on each is asked of the system, which takes 2 to 4
# times as long (4096 x 4096, ranks 8 and 16).
_WEIGHTS_PER_BLOCK = 3 << 13

ReadRange = Callable[[TensorInfo, int, memoryview], None]


@dataclass(frozen=True)
class LowRankUpdate:
    """What one adapter adds to a matrix: scale * (left @ right).

    Shapes: left [rows, rank], right [rank, columns]; both stored transposed if `is_transposed`
    """

    left: TensorInfo
    right: TensorInfo
    scale: float
    is_transposed: bool = False


@dataclass(frozen=True)
class MergedTensor(TensorInfo):
    """A tensor of a base model, with its name, dtype, shape and place there, that has other values.

    They are those of `source`, a float tensor of the same shape, plus the updates; added in float32, in their order,
    and rounded to `dtype` once.
    """

    source: TensorInfo
    updates: tuple[LowRankUpdate, ...] = ()


class Merger:
    """Computes bytes of merged tensors, for one thread; `read` reads those of files. Keeps one tensor's factors."""

    def __init__(self, read: ReadRange):
        self._read = read
        self._owner: MergedTensor | None = None
        self._factors: list[tuple[Array, Array, np.float32]] = []

    def fill(self, tensor: MergedTensor, begin: int, view: memoryview) -> None:
        """Fill a view of bytes from the byte `begin` of the tensor on.

        Raises: CheckpointError for read errors, an adapter with NaN or infinity, and sums that the dtype cannot hold
        """
        if self._owner is not tensor:
            self._factors = [self._read_factors(update) for update in tensor.updates]
            self._owner = tensor
        num_columns = math.prod(tensor.shape[1:])
        row_bytes = num_columns * ITEMSIZE_BYTES[tensor.dtype]
        block_rows = max(1, _WEIGHTS_PER_BLOCK // num_columns)
        end = begin + len(view)
        first_row = begin // row_bytes // block_rows * block_rows
        for row in range(first_row, -(-end // row_bytes), block_rows):
            block = self._block(tensor, row, min(row + block_rows, tensor.shape[0]), num_columns)
            low, high = max(begin, row * row_bytes), min(end, row * row_bytes + len(block))
            view[low - begin : high - begin] = block[low - row * row_bytes : high - row * row_bytes]

    def _block(self, tensor: MergedTensor, row: int, end_row: int, num_columns: int) -> memoryview:
        """Rows row ... end_row - 1 as they are stored."""
        source = tensor.source
        values = self._read_floats(source, row * num_columns, (end_row - row, num_columns))
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is seen below
            for left, right, scale in self._factors:
                product = left[row:end_row] @ right
                product *= scale
                values += product
        limit = LARGEST_ROUNDED[tensor.dtype]
        if not (values.max() <= limit and values.min() >= -limit):  # NaN is neither
            raise CheckpointError(
                f"{tensor.name} holds NaN or infinity, or values too large for {tensor.dtype}, once the adapter is "
                "added; the model or the adapter is damaged, or the adapter's weight too large"
            )
        stored = round_nearest(values, tensor.dtype)
        return stored.reshape(-1).view(np.uint8).data

    def _read_factors(self, update: LowRankUpdate) -> tuple[Array, Array, np.float32]:
        left, right = (self._read_factor(info) for info in (update.left, update.right))
        if update.is_transposed:
            left, right = np.ascontiguousarray(left.T), np.ascontiguousarray(right.T)
        with np.errstate(over="ignore"):  # the sums show what overflows
            return left, right, np.float32(update.scale)

    def _read_factor(self, info: TensorInfo) -> Array:
        values = self._read_floats(info, 0, info.shape)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{info.name} in {info.path} holds NaN or infinity; the adapter is damaged, download it again"
            )
        return values

    def _read_floats(self, info: TensorInfo, first: int, shape: tuple[int, ...]) -> Array:
        """Elements from `first` on, as float32. Shapes: result as asked for"""
        stored = np.empty(shape, STORED_AS[info.dtype])
        self._read(info, first * stored.itemsize, stored.reshape(-1).view(np.uint8).data)
        return widen(stored, info.dtype)
