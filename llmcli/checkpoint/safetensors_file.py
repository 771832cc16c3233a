"""One safetensors file: the safetensors library reads its header, and from that follows where each tensor's bytes lie.

Added here is what the library does not do: it waits at a named pipe, maps what is no file, takes one of two tensors of
the same name, and has types below one byte. It maps the file into memory; the mapping ends before `read_header` does,
and the bytes themselves are read by ranges (reader.py).
"""

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open

from llmcli.checkpoint.safetensors_header import (
    ITEMSIZE_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    check_entries,
    raise_fault,
    truncated,
    unsupported_dtype,
)
from llmcli.errors import CheckpointError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.reading import GIT_LFS_START


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies on disk: `num_bytes` bytes, row-major and little-endian, at `offset` from the file's start.

    `dtype` is the header's word: "BF16", "F16", "F32", "I32" and so on.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the file by name, in the order of their bytes; the bytes themselves are not read.

    Raises: CheckpointError when the file is missing, truncated or damaged, or its header and length disagree;
    UnsupportedModelError for a dtype that is not a whole number of bytes, or is not known.
    Source: the format as the safetensors library reads it: tensors fill the data without holes or overlaps.
    """
    try:
        with open(_open_regular(path), "rb") as file:
            state = os.fstat(file.fileno())
            header = _read_header_bytes(file, path, state.st_size)
            parsed = _parse(path, header, state.st_size)
            check_entries(header, path)
            is_same = _identity(os.stat(path)) == _identity(os.fstat(file.fileno())) == _identity(state)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check its permissions and the disk") from error
    infos, end = [], LENGTH_BYTES + len(header)
    for name, dtype, shape in parsed:
        if dtype not in ITEMSIZE_BYTES:
            raise unsupported_dtype(name, dtype, path)
        num_bytes = math.prod(shape) * ITEMSIZE_BYTES[dtype]
        infos.append(TensorInfo(name, dtype, tuple(shape), path, end, num_bytes))
        end += num_bytes
    # The library has opened the path anew, and vouches only for what was there then.
    if not is_same or end != state.st_size:
        raise CheckpointError(f"{path} changed while it was read; wait until it is written or downloaded, then retry")
    # Where empty tensors share an offset, the library's order differs from run to run.
    infos.sort(key=lambda info: (info.offset, info.num_bytes, info.name))
    return {info.name: info for info in infos}


def _open_regular(path: Path) -> int:
    """A descriptor of the file. Named pipes, which would wait for ever, and devices are refused.

    Raises: CheckpointError; OSError
    """
    # Not blocking: a pipe may have taken the file's place since.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_file():
        descriptor = os.open(path, flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise CheckpointError(f"{path} is missing, a broken link or not a file; incomplete download?")


def _read_header_bytes(file: BinaryIO, path: Path, file_bytes: int) -> bytes:
    """The JSON part of the header.

    Raises: CheckpointError; OSError
    """
    start = file.read(len(GIT_LFS_START))
    if start == GIT_LFS_START:
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the weights themselves; run `git lfs pull` in its folder"
        )
    if len(start) < LENGTH_BYTES:
        raise truncated(path, file_bytes, LENGTH_BYTES)
    header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "it is damaged or not a safetensors file, download it again"
        )
    if file_bytes < LENGTH_BYTES + header_bytes:
        raise truncated(path, file_bytes, LENGTH_BYTES + header_bytes)
    file.seek(LENGTH_BYTES)
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise truncated(path, LENGTH_BYTES + len(header), LENGTH_BYTES + header_bytes)
    return header


def _parse(path: Path, header: bytes, file_bytes: int) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor in the order of their bytes, as the library has it.

    Raises: LLMCliError
    """
    try:
        with (
            foreign_errors_explained(f"the safetensors library cannot read {path}", CheckpointError),
            safe_open(path, framework="numpy") as file,
        ):
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            return [(name, part.get_dtype(), part.get_shape()) for name, part in slices]
    except CheckpointError:
        raise_fault(header, path, file_bytes)
        raise


def _identity(state: os.stat_result) -> tuple[int, int, int, int]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
