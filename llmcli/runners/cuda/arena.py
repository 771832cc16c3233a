"""One allocation on the card, cut into arrays that were planned by name; and the copies between them and the host.

Nothing here goes through CuPy's memory pool or compiles a kernel: what is freed is the card's again at once. CuPy is
imported with the first use, since plans are made of the same forward pass on machines without it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.kernels.device import Device, device_errors
from llmcli.runners.cuda.regions import Region, held_bytes, with_offsets

_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class Arena:
    """Memory of the card for `regions`, of `num_bytes` if they need less; it lives as long as one of its arrays.

    Raises: InsufficientMemoryError
    """

    def __init__(self, regions: Iterable[Region], num_bytes: int = 1):
        regions = list(regions)
        self.num_bytes = max(held_bytes(regions), num_bytes)
        self._start = allocate(self.num_bytes)
        self._arrays = self.overlay(regions)

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def overlay(self, regions: Iterable[Region]) -> dict[str, Any]:
        """Other arrays in the same memory, for a time in which the planned ones are not used.

        Raises: ValueError if they need more
        """
        regions = list(regions)
        if held_bytes(regions) > self.num_bytes:
            raise ValueError(f"{held_bytes(regions)} bytes do not fit an arena of {self.num_bytes}")
        import cupy

        return {
            region.name: cupy.ndarray(region.shape, region.dtype, self._start + begin)
            for region, begin in with_offsets(regions)
        }


def allocate(num_bytes: int) -> Any:
    """A pointer to memory of the card, freed with the last array in it.

    Raises: InsufficientMemoryError
    """
    import cupy

    with device_errors():
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_bytes), 0)


def free_bytes() -> int:
    """Bytes of the current card that nobody holds."""
    import cupy

    with device_errors():
        free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free)


def send(device: Device, target: Any, source: npt.NDArray[Any]) -> None:
    """Queue a copy from the host. `source` may be reused at once unless it is pinned.

    Shapes: target a C-contiguous array on the card of the bytes of `source`
    """
    source = np.ascontiguousarray(source)
    with device_errors():
        target.data.copy_from_host_async(source.ctypes.data, source.nbytes, device.stream)


def fetch(device: Device, source: Any) -> npt.NDArray[Any]:
    """An array of the card on the host, after everything queued so far. Shapes: result as source."""
    result = np.empty(source.shape, source.dtype)
    with device_errors():
        source.data.copy_to_host_async(result.ctypes.data, result.nbytes, device.stream)
    device.synchronize()
    return result


def copy(device: Device, target: Any, source: Any) -> None:
    """Queue a copy on the card. Shapes: target, source C-contiguous of the same size."""
    with device_errors():
        target.data.copy_from_device_async(source.data, source.nbytes, device.stream)


def copy_blocks(device: Device, target: Any, source: Any, num_bytes: int) -> None:
    """Queue a copy of the first `num_bytes` of each block.

    Shapes: target, source [blocks, ...] of one shape, the blocks contiguous
    """
    import cupy

    with device_errors():
        cupy.cuda.runtime.memcpy2DAsync(
            target.data.ptr,
            target.strides[0],
            source.data.ptr,
            source.strides[0],
            num_bytes,
            len(source),
            _DEVICE_TO_DEVICE,
            device.stream.ptr,
        )
