"""Kernels as CuPy has them: RawKernels of a RawModule that loads a cached file, launched by CuPy's own call."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.launches import Launch, bytes_of

_DEFAULT_SHARED_LIMIT = 48 * 1024  # static and dynamic together; above it the driver wants to be told


class LoadedKernel:
    """A RawKernel and how much shared memory it may have; it holds its module. For the current card."""

    def __init__(self, raw: Any, static_shared_bytes: int) -> None:
        """`raw` is the RawKernel."""
        self.raw = raw
        self._max_dynamic_shared_bytes = _DEFAULT_SHARED_LIMIT - static_shared_bytes

    @property
    def function(self) -> int:
        """The driver's handle."""
        return int(self.raw.kernel.ptr)

    def allow_shared(self, shared_bytes: int) -> None:
        """Let it be launched with this much dynamic shared memory a block.

        Raises: CuPy's error
        """
        if shared_bytes > self._max_dynamic_shared_bytes:
            self.raw.max_dynamic_shared_size_bytes = shared_bytes
            self._max_dynamic_shared_bytes = shared_bytes


class RawLaunch:
    """A launch by CuPy's call, of which only addresses are missing."""

    def __init__(self, launch: Launch, kernel: LoadedKernel, stream: Any) -> None:
        """`check_launch` has passed it.

        Raises: TypeError for what CUDA would misread
        """
        self.label = (launch.stem, launch.name)
        self._raw = kernel.raw
        self._sizes = launch.grid, (launch.block,)
        self._options = {"shared_mem": launch.shared_bytes, "stream": stream}
        # CuPy passes on an array of one item as it lies in memory, whatever its size: what a structure needs.
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
