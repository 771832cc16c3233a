"""Fills the caller's buffers with tensors from disk, by large sequential reads.

Never maps a file: on network disks, WSL and Windows page-sized faults make loading many times slower.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from llmcli.checkpoint.merged_tensor import MergedTensor, Merger
from llmcli.checkpoint.safetensors_file import TensorInfo, printable
from llmcli.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Large enough that the calls cost nothing, small enough that Ctrl-C is answered between two reads from a slow disk.
CHUNK_BYTES = 32 * 1024**2


class TensorReader:
    """Reads tensors by their TensorInfo; keeps one file open per shard until the `with` block ends. Not thread-safe.

    Who reads a `MergedTensor` gets what its adapters make of it, so nobody else needs to know of adapters.
    """

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._merger = Merger(self._read_range)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_tensor_into(self, info: TensorInfo, buffer: WriteableBuffer) -> None:
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

    def read_range_into(self, info: TensorInfo, begin: int, buffer: WriteableBuffer) -> None:
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
                # May return fewer bytes than asked for (signals, network disks, the system's own limit): 0 is the end.
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
