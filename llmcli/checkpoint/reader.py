"""Reads tensors from disk by large sequential reads, into buffers or arrays, and adds the adapters' updates.

Never maps a file: on network disks, WSL and Windows page-sized faults make loading many times slower.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, TensorInfo, printable
from llmcli.errors import CheckpointError
from llmcli.quantization.rounding import LARGEST_ROUNDED, STORED_AS, Array, round_nearest, widen

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# `MergedTensor`: a model's tensor to which adapters add updates as it is read; `Merger` computes it.

# Sums are computed in whole blocks of rows, for any part that is read, so a weight's bits do not depend on how it is
# cut for reading. Blocks are 96 KiB of floats: from 128 KiB on the system allocates each, which takes 2 to 4
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
        with np.errstate(over="ignore"):  # overflow shows in the sums
            return left, right, np.float32(update.scale)

    def _read_factor(self, info: TensorInfo) -> Array:
        values = self._read_floats(info, 0, info.shape)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{info.name} in {info.path} holds NaN or infinity; the adapter is damaged, download it again"
            )
        return values

    def _read_floats(self, info: TensorInfo, first: int, shape: tuple[int, ...]) -> Array:
        """Elements from `first` on, as float32. Shapes: result as requested"""
        stored = np.empty(shape, STORED_AS[info.dtype])
        self._read(info, first * stored.itemsize, stored.reshape(-1).view(np.uint8).data)
        return widen(stored, info.dtype)


# Large enough that the calls cost nothing, small enough that Ctrl-C is answered between two reads from a slow disk.
CHUNK_BYTES = 32 * 1024**2


class TensorReader:
    """Reads tensors by their TensorInfo; keeps one file open per shard until the `with` block ends. Not thread-safe.

    Reading a `MergedTensor` gives the merged values, so no other code needs to know of adapters.
    """

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._merger = Merger(self._read_range)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_tensor_into(self, info: TensorInfo, buffer: "WriteableBuffer") -> None:
        """Fill `buffer` with the tensor's bytes as they are on disk.

        Fastest in the order of a file's offsets, which is the order of `read_header`.
        Shapes: buffer any C-contiguous writable buffer of exactly `info.num_bytes` bytes, of any item type.
        Raises: CheckpointError when the file is gone, shorter than its header said, or the disk fails;
        ValueError when the buffer does not fit the tensor, which is the caller's mistake.
        """
        view = memoryview(buffer)
        if view.nbytes != info.num_bytes or view.readonly or not view.c_contiguous:
            raise ValueError(
                f"{info.name} needs a writable C-contiguous buffer of {info.num_bytes} bytes, "
                f"got {view.nbytes} bytes, readonly={view.readonly}, c_contiguous={view.c_contiguous}"
            )
        if info.num_bytes > 0:  # a view with a zero in its shape cannot be cast
            self._read_range(info, 0, view.cast("B"))

    def read_range_into(self, info: TensorInfo, begin: int, buffer: "WriteableBuffer") -> None:
        """Fill `buffer` with the tensor's bytes from the byte `begin` on, for a caller that converts piece by piece.

        Shapes: buffer any C-contiguous writable buffer of at most `info.num_bytes - begin` bytes.
        Raises: as `read_tensor_into`.
        """
        view = memoryview(buffer)
        if begin < 0 or begin + view.nbytes > info.num_bytes or view.readonly or not view.c_contiguous:
            raise ValueError(f"{info.name} of {info.num_bytes} bytes has no {view.nbytes} bytes from {begin} on")
        self._read_range(info, begin, view.cast("B"))

    def is_equal(self, first: TensorInfo, second: TensorInfo) -> bool:
        """Whether two tensors have the same dtype, shape and bytes; holds two chunks of them at a time.

        Raises: CheckpointError as `read_tensor_into`.
        """
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        for begin in range(0, first.num_bytes, CHUNK_BYTES):
            # bytearrays compare by memcmp, memoryviews element by element.
            chunk = bytearray(min(CHUNK_BYTES, first.num_bytes - begin))
            other = bytearray(len(chunk))
            self._read_range(first, begin, memoryview(chunk))
            self._read_range(second, begin, memoryview(other))
            if chunk != other:
                return False
        return True

    def _read_range(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        """Fill a view of bytes from the byte `begin` of the tensor on."""
        if isinstance(info, MergedTensor):
            self._merger.fill(info, begin, view)
        else:
            self._read_file(info, begin, view)

    def _read_file(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        num_read = 0
        try:
            file = self._open(info.path)
            file.seek(info.offset + begin)
            while num_read < len(view):
                # May return fewer bytes than requested (signals, network disks, the system's own limit): 0 is the end.
                count = file.readinto(view[num_read : num_read + CHUNK_BYTES])
                if not count:
                    break
                num_read += count
        except OSError as error:
            raise CheckpointError(
                f"{printable(info.name)} cannot be read from {info.path}: {error.strerror}; check the disk"
            ) from error
        if num_read < len(view):
            raise CheckpointError(
                f"{printable(info.name)} in {info.path} ends after {begin + num_read} bytes of {info.num_bytes}: "
                "the file has shrunk since its header was read; download it again"
            )

    def _open(self, path: Path) -> FileIO:
        # A plain unbuffered file: as fast as os.preadv (both 11 to 15 GB/s from the page cache), and on every system.
        if path not in self._files:
            self._files[path] = FileIO(path)
        return self._files[path]


# Reads tensors, or rows of them, into arrays.

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
