"""What turns blocks of a weight's rows into packed codes while an export is written; here by threads of the CPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from llmcli.quantization.floats import STORED_AS, Array
from llmcli.quantization.packing import pack_rows
from llmcli.quantization.rounding import RowErrors, quantize_rows
from llmcli.quantization.schemes import WeightScheme

# Long against a hand-over between threads, short enough that the floats it makes stay in a core's cache and that few
# threads run dry while a weight comes to its end.
WEIGHTS_PER_TASK = 1 << 18
MAX_THREADS = 8  # beyond that, one reading and writing thread has nothing left to hand out


@dataclass(frozen=True)
class PackedRows:
    """A block of rows as it goes into the export.

    Shapes: packed int32 [rows, words]; scales float32 [rows, groups], representable in the dtype they are stored in;
    zero_points uint8 [rows, groups], None if symmetric.
    """

    packed: Array
    scales: Array
    zero_points: Array | None
    errors: RowErrors


class PendingRows(Protocol):
    """A block on its way."""

    def result(self) -> PackedRows | None:
        """The block, waited for; None if a weight is NaN or infinite, or too large for its scale's dtype.

        `packed` is the caller's until `capacity` more buffers have been asked for.
        """
        ...


class RowQuantizer(Protocol):
    """Quantizes blocks of rows, up to `capacity` of them at a time. Results are asked for in order.

    The one on the CPU and the one on a card give the same bytes.
    """

    capacity: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def block_rows(self, input_size: int) -> int:
        """How many rows of `input_size` weights make a block."""
        ...

    def buffer(self, shape: tuple[int, int], dtype: str) -> Array:
        """Where the next block is to be read to. Shapes: as asked for, as floats.STORED_AS[dtype]."""
        ...

    def submit(self, stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PendingRows:
        """Begin with the block in the latest buffer; the scheme's group size must divide its rows."""
        ...


class ThreadedQuantizer:
    """The CPU's: a few threads, a block each."""

    def __init__(self) -> None:
        num_threads = min(os.cpu_count() or 1, MAX_THREADS)
        self.capacity = 2 * num_threads + 1  # a block waits for each thread that works on another
        self._pool = ThreadPoolExecutor(num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def block_rows(self, input_size: int) -> int:
        """How many rows of `input_size` weights make a block."""
        return max(1, WEIGHTS_PER_TASK // input_size)

    def buffer(self, shape: tuple[int, int], dtype: str) -> Array:
        """Where the next block is to be read to."""
        return np.empty(shape, STORED_AS[dtype])

    def submit(self, stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PendingRows:
        """Begin with the block in the latest buffer."""
        return self._pool.submit(quantize_and_pack, stored, dtype, scheme, scale_dtype)


def quantize_and_pack(stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> PackedRows | None:
    """`quantize_rows`, and the codes packed."""
    block = quantize_rows(stored, dtype, scheme, scale_dtype)
    if block is None:
        return None
    return PackedRows(pack_rows(block.codes, scheme.num_bits), block.scales, block.zero_points, block.errors)
