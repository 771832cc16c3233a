"""The header of a safetensors file in words: its limits, its types, and what is wrong with one, by tensor and value.

The safetensors library decides what a header says (safetensors_file.py). `check_entries` refuses what it lets through;
`raise_fault` says of what it has refused which tensor is wrong, in which value, and what was expected.
"""

import json
import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from llmcli.errors import CheckpointError, LLMCliError, UnsupportedModelError

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
_MAX_TENSOR_BYTES = 2**63 - 1  # the largest file offset; also bounds the product of a hostile shape
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_SURROGATE = re.compile("[\ud800-\udfff]")

_shortened = reprlib.Repr()
_shortened.maxstring = 200

_PLAIN_ENTRY = None  # stands for an entry with nothing odd about it, so that 200,000 of them take no memory


def printable(value: object) -> str:
    """A value out of a file, fit for a one-line message: control characters escaped, long ones shortened."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _shortened.maxstring:
        return value
    return _shortened.repr(value)


def truncated(path: Path, actual_bytes: int, expected_bytes: int) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(
        f"{path} is truncated: {actual_bytes} bytes of {expected_bytes}; incomplete download? Download it again"
    )


def check_entries(header: bytes, path: Path) -> None:
    """Refuse what the library lets through: of two tensors of one name it takes the last, and much else it passes over.

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
    """Raise why the library has refused a file of this header and length; return if this cannot tell.

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
    if metadata is not None and not _maps_text_to_text(metadata):
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


def _maps_text_to_text(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(text) for pair in value.items() for text in pair)


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
