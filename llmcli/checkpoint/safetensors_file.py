"""The header of one safetensors file: where each tensor's bytes lie, checked before any of them is read.

Refuses whatever the safetensors library refuses, and also duplicate names, unknown keys and dtypes below one byte.
"""

import json
import re
import reprlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.errors import CheckpointError, UnsupportedModelError

ITEMSIZE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LENGTH_BYTES = 8  # the file begins with the header's length, unsigned and little-endian
MAX_TENSOR_BYTES = 2**63 - 1  # the largest file offset; also bounds the product of a hostile shape
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
GIT_LFS_START = b"version https://git-lfs"

_SURROGATE = re.compile("[\ud800-\udfff]")

_shortened = reprlib.Repr()
_shortened.maxstring = 200


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


def printable(value: object) -> str:
    """A value out of a file, fit for a one-line message: control characters escaped, long ones shortened."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _shortened.maxstring:
        return value
    return _shortened.repr(value)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the file by name, in the order of their bytes; the bytes themselves are not read.

    Raises: CheckpointError when the file is missing, truncated or damaged, or its header and length disagree;
    UnsupportedModelError for a dtype that is not a whole number of bytes, or is not known.
    Source: the format as the safetensors library reads it: tensors fill the data without holes or overlaps.
    """
    header, file_bytes = _read_header_bytes(path)
    data_start = LENGTH_BYTES + len(header)
    infos = [_tensor_info(name, entry, data_start, path) for name, entry in _header_entries(header, path)]
    infos.sort(key=lambda info: (info.offset, info.num_bytes))

    end = data_start
    for info in infos:
        if info.offset != end:
            raise CheckpointError(
                f"{printable(info.name)} in {path} begins at byte {info.offset - data_start} of the data, expected "
                f"{end - data_start}: tensors overlap or leave a hole; the file is damaged, download it again"
            )
        end += info.num_bytes
    if file_bytes < end:
        raise _truncated(path, file_bytes, end)
    if file_bytes > end:
        raise CheckpointError(
            f"{path} is {file_bytes} bytes long, its header describes {end}; the file is damaged, download it again"
        )
    return {info.name: info for info in infos}


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON part of the header, and the length of the whole file in bytes."""
    try:
        if not path.is_file():  # asked first: opening a named pipe would wait for ever
            raise CheckpointError(f"{path} is missing, a broken link or not a file; incomplete download?")
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(GIT_LFS_START))
            if start == GIT_LFS_START:
                raise CheckpointError(
                    f"{path} is a git-lfs pointer, not the weights themselves; run `git lfs pull` in its folder"
                )
            if len(start) < LENGTH_BYTES:
                raise _truncated(path, file_bytes, LENGTH_BYTES)
            header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} has a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed; "
                    "it is damaged or not a safetensors file, download it again"
                )
            file.seek(LENGTH_BYTES)
            header = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check its permissions and the disk") from error
    if len(header) < header_bytes:
        raise _truncated(path, LENGTH_BYTES + len(header), LENGTH_BYTES + header_bytes)
    return header, file_bytes


def _truncated(path: Path, actual_bytes: int, expected_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: {actual_bytes} bytes of {expected_bytes}; incomplete download? Download it again"
    )


def _header_entries(header: bytes, path: Path) -> list[tuple[str, Any]]:
    """The (name, entry) pairs of the header, without `__metadata__`, which must map strings to strings."""
    try:
        entries = json.loads(
            header.decode("utf-8"), object_pairs_hook=_object_without_duplicates, parse_int=_bounded_int
        )
    # ValueError covers bad UTF-8, bad JSON and the hooks; nesting that is too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise _bad_header(path, f"is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _bad_header(path, f"is a JSON {type(entries).__name__}, expected an object")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not _maps_text_to_text(metadata):
        raise _bad_header(path, "has a __metadata__ that does not map strings to strings")
    return list(entries.items())


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{printable(name)} is described {count} times")
    return result


def _bounded_int(digits: str) -> int:
    # No byte count needs more than 20 digits, and huge ones are slow to multiply; the library takes "-0" for a float.
    if len(digits) > 20 or digits == "-0":
        raise ValueError(f"{printable(digits)} is not a size")
    return int(digits)


def _is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can hold: JSON escapes allow half a surrogate pair."""
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _maps_text_to_text(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(text) for pair in value.items() for text in pair)


def _tensor_info(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    """One checked entry of the header. Whether it fits beside the others and into the file is for the caller."""
    if not _is_text(name) or not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        expected = f"expected an object of {sorted(ENTRY_KEYS)}"
        raise _bad_header(path, f"describes tensor {printable(name)} by {printable(entry)}, {expected}")
    dtype, shape, data_offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE_BYTES:
        raise UnsupportedModelError(
            f"{printable(name)} in {path} has dtype {printable(dtype)}, expected one of {', '.join(ITEMSIZE_BYTES)}; "
            "use a model stored in BF16, F16 or F32"
        )
    if not _are_sizes(shape):
        what = f"the shape {printable(shape)}, expected a list of integers from 0 up"
        raise _bad_header(path, f"gives tensor {printable(name)} {what}")
    if not _are_sizes(data_offsets) or len(data_offsets) != 2 or data_offsets[0] > data_offsets[1]:
        what = f"data_offsets {printable(data_offsets)}, expected [begin, end]"
        raise _bad_header(path, f"gives tensor {printable(name)} {what}")
    begin, end = data_offsets
    if end - begin != _num_bytes(shape, ITEMSIZE_BYTES[dtype]):
        what = f"{end - begin} bytes of data, which is not {dtype} of shape {printable(shape)}"
        raise _bad_header(path, f"gives tensor {printable(name)} {what}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _are_sizes(value: object) -> bool:
    # bool is an int in Python, but `true` is not a size.
    return isinstance(value, list) and all([type(item) is int and item >= 0 for item in value])  # faster than lazily


def _num_bytes(shape: list[int], itemsize_bytes: int) -> int | None:
    """The bytes of a tensor, or None if they (or those of its non-zero dimensions alone) could not lie in any file."""
    num_bytes = itemsize_bytes
    for dimension in shape:
        if dimension > 0:
            num_bytes *= dimension
        if num_bytes > MAX_TENSOR_BYTES:
            return None
    return 0 if 0 in shape else num_bytes


def _bad_header(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the header of {path} {what}; the file is damaged, download it again")
