"""GGUF files: metadata and tensors of one file, or of several that belong together (`-00001-of-00003`).

The header is read here, with every count checked against the bytes that are left: the `gguf` library's reader maps the
file and loops over the counts of a damaged one without end. Types of blocks, their sizes and values are the library's.
Source: ggml's docs/gguf.md.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llmcli.checkpoint.safetensors_file import printable
from llmcli.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_SPLITS = 10_000
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# By the number of a value's type. The numbers of strings and arrays are below.
_NUMBERS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in blocks. Shapes: `shape` as Hugging Face has it, outputs first. Units: bytes, from the file's start"""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """The files of a model, its metadata, and its tensors by their names there."""

    path: Path
    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a model's files, of which `path` is the only or the first one.

    Raises: CheckpointError for files that are missing or damaged; UnsupportedModelError for a version or a type of
    blocks that is not known
    """
    metadata, tensors = _read_header(path)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_SPLITS:
        raise CheckpointError(f"{path}: split.count is {printable(count)}, expected the number of files")
    paths = [path]
    if count > 1:
        paths = _split_paths(path, count)
        for number, other in enumerate(paths[1:], 1):
            its_metadata, its_tensors = _read_header(other)
            if its_metadata.get("split.no") != number or its_metadata.get("split.count") != count:
                raise CheckpointError(
                    f"{other} is not file {number + 1} of the {count} of {path.name}; download it again"
                )
            if both := tensors.keys() & its_tensors.keys():
                raise CheckpointError(f"{other} repeats {printable(min(both))} of another file; download both again")
            tensors |= its_tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{path}: the files hold {len(tensors)} tensors, expected {printable(expected)}")
    return GgufFile(path, tuple(paths), metadata, tensors)


def _split_paths(path: Path, count: int) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files, expected a name such as model-00001-of-{count:05}.gguf; "
            "give the files the names that they were published with"
        )
    if int(match[2]) != 1:
        raise CheckpointError(
            f"{path} is file {int(match[2])} of {count}; give the first one, {match[1]}-00001-of-{match[3]}.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the model's {count} files, {missing[0]} first; download them"
        )
    return paths


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist, or is not a file; give the path of a GGUF file")
        with path.open("rb") as file:
            return _Header(path, file).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


class _Header:
    """Reads one header."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._left = os.fstat(file.fileno()).st_size
        self._size = self._left

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return metadata and tensors."""
        if self._bytes(4) != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file; incomplete download?")
        version = self._number(4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is big-endian" if swapped else f"has GGUF version {version}"
            raise UnsupportedModelError(f"{self._path} {what}, expected little-endian files of version 2 or 3")
        num_tensors, num_values = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"{printable(key)} stands in it twice")
            metadata[key] = self._value(self._number(4))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise self._damaged(f"general.alignment is {printable(alignment)}")
        header_bytes = self._size - self._left
        start = -(-header_bytes // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in entries:
            tensor = GgufTensor(name, kind, shape, self._path, start + offset)
            if name in tensors:
                raise self._damaged(f"{printable(name)} stands in it twice")
            if tensor.offset + tensor.num_bytes > self._size:
                raise CheckpointError(
                    f"{self._path} is truncated: {printable(name)} ends at byte {tensor.offset + tensor.num_bytes} of "
                    f"{self._size}; incomplete download? Download it again"
                )
            tensors[name] = tensor
        return metadata, tensors

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._text()
        num_dimensions = self._number(4)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"{printable(name)} has {num_dimensions} dimensions")
        shape = tuple(self._number(8) for _ in range(num_dimensions))[::-1]
        number, offset = self._number(4), self._number(8)
        if number not in set(GGMLQuantizationType):
            raise UnsupportedModelError(f"{printable(name)} in {self._path} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        if min(shape) < 1 or math.prod(shape) > 2**48:
            raise self._damaged(f"{printable(name)} has the shape {list(shape)}")
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise self._damaged(f"rows of {printable(name)} are no whole blocks of {kind.name}")
        return name, kind, shape, offset

    def _value(self, number: int) -> Any:
        if number in _NUMBERS:
            form = _NUMBERS[number]
            return form.unpack(self._bytes(form.size))[0]
        if number == _STRING:
            return self._text()
        if number != _ARRAY:
            raise self._damaged(f"a value has the unknown type {number}")
        of = self._number(4)
        if of in _NUMBERS:
            form = _NUMBERS[of]
            count = self._count(form.size)
            return [value for (value,) in form.iter_unpack(self._bytes(count * form.size))]
        if of != _STRING:
            raise self._damaged(f"an array has the type {of}")  # arrays of arrays: nobody writes them
        return [self._text() for _ in range(self._count(8))]

    def _text(self) -> str:
        data = self._bytes(self._count(1))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{data[:20]!r} is not UTF-8") from None

    def _count(self, least_bytes: int) -> int:
        """Read a count of things. Raises: CheckpointError if `least_bytes` for each are more than are left"""
        count = self._number(8)
        if count * least_bytes > self._left:
            raise self._damaged(f"it counts {count} things where {self._left} bytes are left")
        return count

    def _number(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise CheckpointError(f"{self._path} is truncated: its header ends too early; download it again")
        self._left -= count
        return data

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {why}; download it again")
