"""The driver calls that CuPy does not offer: a launch that may overlap the one before, and more shared memory.

CuPy's own launches take no attributes; one way to launch for both kinds keeps them alike.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels import environment
from llmcli.kernels.launches import Launch, is_address

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_*
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*
_MAX_BLOCK = 1024

# CUlaunchConfig: grid and block, bytes of shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@6II4xPPI4x")

# CUlaunchAttribute: an id, and a union of 64 bytes of which this id uses an int.
_OVERLAP = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)

_SCALARS = (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64)
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ALIGNMENT = 8  # the largest of a scalar, and of a structure's fields


class BoundLaunch:
    """A launch of which only addresses are missing, as the driver wants it. For one thread at a time."""

    def __init__(
        self, driver: "LaunchDriver", label: tuple[str, str], function: int, config: bytes, arguments: Sequence[Any]
    ):
        """`label` are stem and name, `arguments` the bytes of each, or None for an address."""
        self.label = label
        self._driver = driver
        self._function = ctypes.c_void_p(function)
        self._config = config
        count = sum(argument is None for argument in arguments)
        self._packing = struct.Struct(f"{count}P")
        # Addresses stand in front, in one row; what never changes follows.
        offsets, next_address, memory = [], 0, bytes(count * _POINTER_BYTES)
        for argument in arguments:
            if argument is None:
                offsets.append(next_address)
                next_address += _POINTER_BYTES
            else:
                offsets.append(len(memory))
                memory += argument + bytes(-len(argument) % _ALIGNMENT)
        self._memory = ctypes.create_string_buffer(memory, max(len(memory), 1))
        start = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])

    def start(self, addresses: Sequence[int]) -> None:
        """Launch with these addresses, in the order of the arguments, which are copied before this returns.

        Raises: DeviceError
        """
        self._packing.pack_into(self._memory, 0, *addresses)
        status = self._driver.library.cuLaunchKernelEx(self._config, self._function, self._pointers, None)
        if status != 0:
            raise DeviceError(f"kernel {self.label[0]} did not start: {self._driver.describe(status)}")


class LaunchDriver:
    """Launches on one card, current in the calling thread; `max_shared_bytes` is its limit a block."""

    def __init__(self, max_shared_bytes: int, library: Any = None) -> None:
        """`library` is the driver's, with its C functions."""
        self._max_shared_bytes = max_shared_bytes
        self.library = library or ctypes.CDLL(environment.DRIVER_LIBRARY)

    def bind(self, launch: Launch, function: int, stream: int, can_overlap: bool) -> BoundLaunch:
        """Everything about a launch of a loaded function but its addresses.

        Raises: TypeError, ValueError for what CUDA would misread
        """
        self._check_sizes(launch.stem, launch.grid, launch.block)
        self._check_shared(launch.stem, launch.shared_bytes)
        arguments = [_bytes_of(launch.stem, position, one) for position, one in enumerate(launch.arguments)]
        x, y, z = (*launch.grid, 1, 1)[:3]
        overlaps = launch.overlaps and can_overlap
        attributes = ctypes.addressof(_OVERLAP) if overlaps else 0
        config = _CONFIG.pack(x, y, z, launch.block, 1, 1, launch.shared_bytes, stream, attributes, int(overlaps))
        return BoundLaunch(self, (launch.stem, launch.name), function, config, arguments)

    def allow_shared(self, stem: str, function: int, shared_bytes: int) -> None:
        """Let a function be launched with this much dynamic shared memory a block.

        Raises: ValueError, DeviceError
        """
        self._check_shared(stem, shared_bytes)
        attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
        status = self.library.cuFuncSetAttribute(ctypes.c_void_p(function), attribute, shared_bytes)
        if status != 0:
            problem = self.describe(status)
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

    def describe(self, status: int) -> str:
        """An error of the driver in words."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown'} (CUDA error {status})"


def _bytes_of(stem: str, position: int, argument: Any) -> bytes | None:
    """An argument as it lies in memory; None for an address that comes with each start."""
    if isinstance(argument, _SCALARS):
        return argument.tobytes()
    if argument is None:
        return bytes(_POINTER_BYTES)
    if isinstance(argument, ctypes.Structure):
        return bytes(argument)
    if is_address(argument):
        return None
    # A Python number has no size of its own, and CUDA would read whatever the kernel declares.
    raise TypeError(
        f"{stem}: argument {position} is {type(argument).__name__}; kernels take arrays on the card, NumPy scalars of "
        "32 or 64 bits, ctypes structures, and None"
    )
