"""The driver calls that CuPy does not offer: a launch that may overlap the one before, and more shared memory.

CuPy's own launches take no attributes; one way to launch for both kinds keeps them alike.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels import environment

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_*
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*
_MAX_BLOCK = 1024

# CUlaunchConfig: grid and block, bytes of shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@6II4xPPI4x")

# CUlaunchAttribute: an id, and a union of 64 bytes of which this id uses an int.
_OVERLAP = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)

_POINTER = "P"
_FORMATS: dict[type, str] = {
    np.int32: "i",
    np.uint32: "I",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f",
    np.float64: "d",
}


@dataclass(frozen=True)
class _Layout:
    """How arguments of certain types lie in memory; worked out once, since a prefill has hundreds of launches."""

    packing: struct.Struct
    offsets: tuple[int, ...]
    is_array: tuple[bool, ...]
    pointers: Any  # the C type of an array of as many pointers

    @classmethod
    def of(cls, stem: str, arguments: Sequence[Any]) -> "_Layout":
        formats = [_format(stem, position, argument) for position, argument in enumerate(arguments)]
        ends = [struct.calcsize("@" + "".join(formats[: position + 1])) for position in range(len(formats))]
        offsets = tuple(end - struct.calcsize(one) for end, one in zip(ends, formats, strict=True))
        is_array = tuple(
            one == _POINTER and argument is not None for one, argument in zip(formats, arguments, strict=True)
        )
        return cls(struct.Struct("@" + "".join(formats)), offsets, is_array, ctypes.c_void_p * len(formats))

    def pack(self, arguments: Sequence[Any]) -> Any:
        """The arguments' bytes; None is a null pointer."""
        values = [
            argument.data.ptr if is_array else _value(argument)
            for argument, is_array in zip(arguments, self.is_array, strict=True)
        ]
        return ctypes.create_string_buffer(self.packing.pack(*values), self.packing.size)


class LaunchDriver:
    """Launches on one card, current in the calling thread; `max_shared_bytes` is its limit a block."""

    def __init__(self, max_shared_bytes: int, library: Any = None) -> None:
        """`library` is the driver's, with its C functions."""
        self._max_shared_bytes = max_shared_bytes
        self._library = library or ctypes.CDLL(environment.DRIVER_LIBRARY)
        self._layouts: dict[tuple[type, ...], _Layout] = {}

    def launch(
        self,
        stem: str,
        function: int,
        grid: tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        shared_bytes: int,
        stream: int,
        overlaps: bool,
    ) -> None:
        """Start a function; `stem` names it in messages. Arguments are copied before this returns.

        Raises: TypeError, ValueError for what CUDA would misread; DeviceError
        """
        self._check_sizes(stem, grid, block)
        self._check_shared(stem, shared_bytes)
        types = tuple(map(type, arguments))
        layout = self._layouts.get(types)
        if layout is None:
            layout = self._layouts[types] = _Layout.of(stem, arguments)
        memory = layout.pack(arguments)
        start = ctypes.addressof(memory)
        pointers = layout.pointers(*[start + offset for offset in layout.offsets])
        x, y, z = (*grid, 1, 1)[:3]
        attributes = ctypes.addressof(_OVERLAP) if overlaps else 0
        config = _CONFIG.pack(x, y, z, block, 1, 1, shared_bytes, stream, attributes, 1 if overlaps else 0)
        status = self._library.cuLaunchKernelEx(config, ctypes.c_void_p(function), pointers, None)
        if status != 0:
            raise DeviceError(f"kernel {stem} did not start: {self._describe(status)}")

    def allow_shared(self, stem: str, function: int, shared_bytes: int) -> None:
        """Let a function be launched with this much dynamic shared memory a block.

        Raises: ValueError, DeviceError
        """
        self._check_shared(stem, shared_bytes)
        attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
        status = self._library.cuFuncSetAttribute(ctypes.c_void_p(function), attribute, shared_bytes)
        if status != 0:
            problem = self._describe(status)
            raise DeviceError(f"kernel {stem} cannot have {shared_bytes} bytes of shared memory a block: {problem}")

    @staticmethod
    def _check_sizes(stem: str, grid: tuple[int, ...], block: int) -> None:
        # CUDA answers all of these with "invalid argument".
        if not 1 <= len(grid) <= 3 or min(grid) < 1:
            raise ValueError(f"{stem}: grid {grid} is empty or not of 1 to 3 dimensions")
        if not 1 <= block <= _MAX_BLOCK:
            raise ValueError(f"{stem}: a block of {block} threads, 1 to {_MAX_BLOCK} are possible")

    def _check_shared(self, stem: str, shared_bytes: int) -> None:
        limit = self._max_shared_bytes
        if not 0 <= shared_bytes <= limit:
            raise ValueError(f"{stem}: {shared_bytes} bytes of shared memory a block, this card has {limit}")

    def _describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown'} (CUDA error {status})"


def _value(argument: Any) -> Any:
    if argument is None:
        return 0
    return bytes(argument) if isinstance(argument, ctypes.Structure) else argument


def _format(stem: str, position: int, argument: Any) -> str:
    """The C type of an argument, as `struct` writes it."""
    scalar = _FORMATS.get(type(argument))
    if scalar is not None:
        return scalar
    if argument is None or hasattr(getattr(argument, "data", None), "ptr"):
        return _POINTER
    if isinstance(argument, ctypes.Structure):  # by value, as aligned as any of its fields
        return f"0q{ctypes.sizeof(argument)}s"
    # A Python number has no size of its own, and CUDA would read whatever the kernel declares.
    raise TypeError(
        f"{stem}: argument {position} is {type(argument).__name__}; kernels take arrays on the card, NumPy scalars of "
        "32 or 64 bits, ctypes structures, and None"
    )
