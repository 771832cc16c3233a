"""Launches through CuPy, of RawKernels of a RawModule that has loaded a cached file; and through the driver.

The driver is for two things that CuPy lacks: overlap with the previous kernel, and fast replays.

A RawKernel's call takes no launch attributes. It also makes an object of every argument at each start. For ten
arguments that takes about 3 times as long as packing their addresses, and replays start thousands of kernels.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels import environment
from llmcli.kernels.launches import POINTER_BYTES, Launch, bytes_of

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*

# CUlaunchConfig: grid and block, bytes of shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@6II4xPPI4x")

# CUlaunchAttribute: an id, and a union of 64 bytes, in which this id uses an int.
_OVERLAP = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)

_DEFAULT_SHARED_LIMIT = 48 * 1024  # static and dynamic together; the driver must permit more

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


class LoadedKernel:
    """A RawKernel for the current card, and the shared memory it is allowed. It keeps its module loaded."""

    def __init__(self, raw: Any, static_shared_bytes: int) -> None:
        """`raw` is the RawKernel."""
        self.raw = raw
        self._max_dynamic_shared_bytes = _DEFAULT_SHARED_LIMIT - static_shared_bytes

    @property
    def function(self) -> int:
        """The driver's handle."""
        return int(self.raw.kernel.ptr)

    def allow_shared(self, shared_bytes: int) -> None:
        """Permit launches with this much dynamic shared memory a block.

        Raises: CuPy's error
        """
        if shared_bytes > self._max_dynamic_shared_bytes:
            self.raw.max_dynamic_shared_size_bytes = shared_bytes
            self._max_dynamic_shared_bytes = shared_bytes


class RawLaunch:
    """A launch by CuPy's call, complete but for its addresses."""

    def __init__(self, launch: Launch, kernel: LoadedKernel, stream: Any) -> None:
        """`check_launch` must have passed the launch.

        Raises: TypeError for an argument that CUDA would misread
        """
        self.label = (launch.stem, launch.name)
        self._raw = kernel.raw
        self._sizes = launch.grid, launch.block_shape
        self._options = {"shared_mem": launch.shared_bytes, "stream": stream}
        # CuPy passes an array of one item by its bytes, whatever its size; structures need that.
        self._arguments = [
            None if content is None else np.frombuffer(content, f"V{len(content)}") for content in bytes_of(launch)
        ]

    def start(self, addresses: Sequence[int]) -> None:
        """Launch with these addresses, in the order of the arguments.

        Raises: DeviceError
        """
        following = iter(addresses)
        arguments = tuple(np.uintp(next(following)) if one is None else one for one in self._arguments)
        try:
            self._raw(*self._sizes, arguments, **self._options)
        except RuntimeError as error:  # CuPy's class for the driver's errors; importing it loads CuPy
            raise DeviceError(f"kernel {self.label[0]} did not start: {error}") from error
