"""Launches kernels through CuPy: RawKernels of a RawModule that has loaded a cached file."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.launches import Launch, bytes_of

_DEFAULT_SHARED_LIMIT = 48 * 1024  # static and dynamic together; the driver must permit more


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
