"""Safetensors files: what a header may hold, one file read by the library, one file written as its data comes."""

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from safetensors import safe_open

from llmcli.errors import CheckpointError, LLMCliError, UnsupportedModelError, foreign_errors_explained
from llmcli.reading import GIT_LFS_START

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# The header of a safetensors file in words: its limits, its types, and what is wrong with one, by tensor and value.
#
# The safetensors library decides what a header says (safetensors_file.py). `check_entries` refuses what it lets
# through; `raise_fault` says which tensor and value is wrong in what it has refused, and what was expected.

ITEMSIZE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LENGTH_BYTES = 8  # the file begins with the header's length, unsigned and little-endian
_MAX_TENSOR_BYTES = 2**63 - 1  # the largest file offset; also bounds the product of a hostile shape
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_SURROGATE = re.compile("[\ud800-\udfff]")

_shortened = reprlib.Repr()
_shortened.maxstring = 200

_PLAIN_ENTRY = None  # for an ordinary entry, so that 200,000 of them take no memory


def printable(value: object) -> str:
    """A value out of a file, fit for a one-line message: control characters escaped, long ones shortened."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _shortened.maxstring:
        return value
    return _shortened.repr(value)


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names, printable; the rest are counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def truncated(path: Path, actual_bytes: int, expected_bytes: int) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(
        f"{path} is truncated: {actual_bytes} bytes of {expected_bytes}; incomplete download? Download it again"
    )


def check_entries(header: bytes, path: Path) -> None:
    """Refuse what the library lets through: of two tensors of one name it takes the last, and it overlooks more.

    Raises: LLMCliError for duplicate names, and for an entry that is not an object of the three keys, dtype a string.
    """
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_plain_or_object)
    except ValueError as error:
        raise _bad_json(path, error) from error
    for name, entry in entries.items():
        if entry is not _PLAIN_ENTRY and name != "__metadata__":
            raise _find_entry_fault(name, entry, path) or _bad_entry(name, entry, path)


def raise_fault(header: bytes, path: Path, file_bytes: int) -> None:
    """Raise the reason why the library refused a file of this header and length; return if unknown.

    Raises: LLMCliError
    """
    entries = _strict_entries(header, path)
    for name, entry in entries.items():
        fault = _find_entry_fault(name, entry, path)
        if fault is not None:
            raise fault
    end = 0
    for begin, next_begin, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
        if begin != end:
            raise CheckpointError(
                f"{printable(name)} in {path} begins at byte {begin} of the data, expected {end}: tensors overlap or "
                "leave a hole; the file is damaged, download it again"
            )
        end = next_begin
    expected_bytes = LENGTH_BYTES + len(header) + end
    if file_bytes < expected_bytes:
        raise truncated(path, file_bytes, expected_bytes)
    if file_bytes > expected_bytes:
        raise CheckpointError(
            f"{path} is {file_bytes} bytes long, its header describes {expected_bytes}; the file is damaged, download "
            "it again"
        )


def unsupported_dtype(name: str, dtype: object, path: Path) -> UnsupportedModelError:
    """The error for a dtype that is not known, or not a whole number of bytes."""
    return UnsupportedModelError(
        f"{printable(name)} in {path} has dtype {printable(dtype)}, expected one of {', '.join(ITEMSIZE_BYTES)}; "
        "use a model stored in BF16, F16 or F32"
    )


def _strict_entries(header: bytes, path: Path) -> dict[str, Any]:
    """The JSON entry of each tensor."""
    try:
        entries = json.loads(
            header.decode("utf-8"), object_pairs_hook=_object_without_duplicates, parse_int=_bounded_int
        )
    # ValueError covers bad UTF-8, bad JSON and the hooks; nesting that is too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, error) from error
    if not isinstance(entries, dict):
        raise _bad_header(path, f"is a JSON {type(entries).__name__}, expected an object")
    metadata = entries.pop("__metadata__", None)
    is_text = isinstance(metadata, dict) and all(_is_text(text) for pair in metadata.items() for text in pair)
    if metadata is not None and not is_text:
        raise _bad_header(path, "has a __metadata__ that does not map strings to strings")
    return entries


def _find_entry_fault(name: str, entry: Any, path: Path) -> LLMCliError | None:
    if not _is_text(name) or not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        return _bad_entry(name, entry, path)
    dtype, shape, data_offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE_BYTES:
        return unsupported_dtype(name, dtype, path)
    if not _are_sizes(shape):
        what = f"the shape {printable(shape)}, expected a list of integers from 0 up"
    elif not _are_sizes(data_offsets) or len(data_offsets) != 2 or data_offsets[0] > data_offsets[1]:
        what = f"data_offsets {printable(data_offsets)}, expected [begin, end]"
    else:
        num_bytes = data_offsets[1] - data_offsets[0]
        if num_bytes == _num_bytes(shape, ITEMSIZE_BYTES[dtype]):
            return None
        what = f"{num_bytes} bytes of data, which is not {dtype} of shape {printable(shape)}"
    return _bad_header(path, f"gives tensor {printable(name)} {what}")


def _bad_header(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the header of {path} {what}; the file is damaged, download it again")


def _bad_json(path: Path, error: Exception) -> CheckpointError:
    return _bad_header(path, f"is not valid JSON: {error}")


def _bad_entry(name: str, entry: object, path: Path) -> CheckpointError:
    expected = f"expected an object of {sorted(_ENTRY_KEYS)}"
    return _bad_header(path, f"describes tensor {printable(name)} by {printable(entry)}, {expected}")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{printable(name)} is described {count} times")
    return result


def _plain_or_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    result = _object_without_duplicates(pairs)
    return _PLAIN_ENTRY if result.keys() == _ENTRY_KEYS and isinstance(result["dtype"], str) else result


def _bounded_int(digits: str) -> int:
    # No byte count needs more than 20 digits, and huge ones are slow to multiply; the library takes "-0" for a float.
    if len(digits) > 20 or digits == "-0":
        raise ValueError(f"{printable(digits)} is not a size")
    return int(digits)


def _is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can hold: JSON escapes allow half a surrogate pair."""
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _are_sizes(value: object) -> bool:
    # bool is an int in Python, but `true` is not a size.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _num_bytes(shape: list[int], itemsize_bytes: int) -> int | None:
    """The bytes of a tensor, or None if they (or those of its non-zero dimensions alone) could not lie in any file."""
    num_bytes = itemsize_bytes
    for dimension in shape:
        if dimension > 0:
            num_bytes *= dimension
        if num_bytes > _MAX_TENSOR_BYTES:
            return None
    return 0 if 0 in shape else num_bytes


# One safetensors file: the safetensors library reads its header, and from that follows where each tensor's bytes lie.
#
# The library waits at a named pipe, maps what is not a file, takes one of two tensors of one name, and has types below
# one byte; all this is refused here. The library maps the file into memory; the mapping ends before `read_header`
# does, and the bytes themselves are read by ranges (reader.py).


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

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes on disk."""
        return self.num_bytes


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
    """The JSON part of the header. Raises: CheckpointError; OSError"""
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
    """Name, dtype and shape of every tensor in the order of their bytes, as the library has it. Raises: LLMCliError"""
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


# Writes a safetensors file whose tensors are known by shape beforehand: the header first, then data as it comes.
#
# The safetensors library writes only tensors that are all in memory, and a shard may be larger than that. So the
# header is written here, and read by the library before the file counts as finished.

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
    """One file being written. `finish` makes it durable; leaving the `with` block without it leaves a partial file.

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

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, name: str, data: "ReadableBuffer", begin: int = 0) -> None:
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

    def _write_all(self, data: "ReadableBuffer") -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]  # a full disk writes a part, then raises
