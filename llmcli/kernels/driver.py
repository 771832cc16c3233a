"""Launches through the driver, for two things that CuPy lacks: overlap with the previous kernel, and fast replays.

A RawKernel's call takes no launch attributes. It also makes an object of every argument at each start. For ten
arguments that takes about 3 times as long as packing their addresses, and replays start thousands of kernels.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from llmcli.errors import DeviceError
from llmcli.kernels import environment
from llmcli.kernels.launches import POINTER_BYTES, Launch, bytes_of

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*

# CUlaunchConfig: grid and block, bytes of shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@6II4xPPI4x")

# CUlaunchAttribute: an id, and a union of 64 bytes, in which this id uses an int.
_OVERLAP = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)

_ALIGNMENT = 8  # the largest alignment of a scalar or of a structure's field


class BoundLaunch:
    """A launch in the driver's form, complete but for its addresses. For one thread at a time."""

    def __init__(
        self, driver: "LaunchDriver", label: tuple[str, str], function: int, config: bytes, arguments: Sequence[Any]
    ):
        """`label`: stem and name. `arguments`: the bytes of each, or None for an address."""
        self.label = label
        self._driver = driver
        self._function = ctypes.c_void_p(function)
        self._config = config
        count = sum(argument is None for argument in arguments)
        self._packing = struct.Struct(f"{count}P")
        # Addresses come first, in one array; the constant arguments follow.
        offsets, next_address, memory = [], 0, bytes(count * POINTER_BYTES)
        for argument in arguments:
            if argument is None:
                offsets.append(next_address)
                next_address += POINTER_BYTES
            else:
                offsets.append(len(memory))
                memory += argument + bytes(-len(argument) % _ALIGNMENT)
        self._memory = ctypes.create_string_buffer(memory, max(len(memory), 1))
        start = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])

    def start(self, addresses: Sequence[int]) -> None:
        """Launch with these addresses, in the order of the arguments. They are copied before this returns.

        Raises: DeviceError
        """
        self._packing.pack_into(self._memory, 0, *addresses)
        status = self._driver.library.cuLaunchKernelEx(self._config, self._function, self._pointers, None)
        if status != 0:
            raise DeviceError(f"kernel {self.label[0]} did not start: {self._driver.describe(status)}")


class LaunchDriver:
    """Launches on one card, which must be current in the calling thread."""

    def __init__(self, library: Any = None) -> None:
        """`library` is the driver's, with its C functions."""
        self.library = library or ctypes.CDLL(environment.DRIVER_LIBRARY)

    def bind(self, launch: Launch, function: int, stream: int, overlaps: bool) -> BoundLaunch:
        """Bind a launch to a loaded function; only addresses remain. `check_launch` must have passed the launch.

        Raises: TypeError for an argument that CUDA would misread
        """
        x, y, z = (*launch.grid, 1, 1)[:3]
        attributes = ctypes.addressof(_OVERLAP) if overlaps else 0
        sizes = (x, y, z, *launch.block_shape, launch.shared_bytes)
        config = _CONFIG.pack(*sizes, stream, attributes, int(overlaps))
        return BoundLaunch(self, (launch.stem, launch.name), function, config, bytes_of(launch))

    def describe(self, status: int) -> str:
        """The driver's words for an error."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown'} (CUDA error {status})"
