"""Writes a safetensors file whose tensors are known by shape beforehand: the header first, then data as it comes.

The safetensors library writes only tensors that are all in memory, and a shard may be larger than that. So the header
is written here, and read by the library before the file counts as finished.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from llmcli.checkpoint.safetensors_file import read_header
from llmcli.checkpoint.safetensors_header import ITEMSIZE_BYTES, LENGTH_BYTES
from llmcli.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ALIGNMENT_BYTES = 8  # of the data's start, as the safetensors library aligns it


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written; `dtype` is the header's word."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file, without the header's entry."""
        return math.prod(self.shape) * ITEMSIZE_BYTES[self.dtype]


class SafetensorsWriter:
    """One file being written. `finish` makes it durable; leaving the `with` block without it leaves a torso.

    Raises: OSError from every method, when the disk is full or fails.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]):
        # Readers view the bytes of a tensor as its dtype in place, so wider items come first and all stay aligned.
        ordered = sorted(tensors, key=lambda tensor: -ITEMSIZE_BYTES[tensor.dtype])
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
        self._offsets: dict[str, int] = {}
        end = 0
        for tensor in ordered:
            offsets = [end, end + tensor.num_bytes]
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            self._offsets[tensor.name] = end
            end += tensor.num_bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT_BYTES)
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._data_start = LENGTH_BYTES + len(header)
        self.num_bytes = self._data_start + end
        self._file = path.open("wb", buffering=0)
        self._write_all(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, name: str, data: ReadableBuffer, begin: int = 0) -> None:
        """Write bytes of the tensor `name` from its byte `begin` on. Shapes: data any C-contiguous buffer."""
        self._file.seek(self._data_start + self._offsets[name] + begin)
        self._write_all(memoryview(data).cast("B"))

    def finish(self) -> None:
        """Return when every byte is on the disk, and the safetensors library has read the header.

        Raises: CheckpointError if it refuses it, or reads something else.
        """
        os.fsync(self._file.fileno())
        found = {
            info.name: OutputTensor(info.name, info.dtype, info.shape) for info in read_header(self._path).values()
        }
        if found != self._tensors:
            raise CheckpointError(f"{self._path} does not hold the tensors that were written; check the disk")

    def _write_all(self, data: ReadableBuffer) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]  # a full disk writes a part, then raises
