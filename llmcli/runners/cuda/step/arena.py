"""Allocates the planned arrays on the card, and copies between them and the host.

Nothing here uses CuPy's memory pool or compiles a kernel; freed memory returns to the card at once. CuPy is imported
on first use: machines without it plan with the same forward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.kernels.device import Device, device_errors
from llmcli.runners.cuda.plan.regions import held_bytes, lay_out

_HOST_TO_DEVICE, _DEVICE_TO_DEVICE = 1, 3  # of cudaMemcpyKind


def on_card(plan: Any) -> Any:
    """Lay out the plan's regions as arrays in one new allocation. They are not cleared.

    Raises: InsufficientMemoryError
    """
    return lay_out(plan, card_memory(held_bytes(plan)))


def card_memory(num_bytes: int) -> Any:
    """Allocate memory of the card. It is freed with the last array in it. Shapes: result uint8 [num_bytes].

    Raises: InsufficientMemoryError
    """
    import cupy

    return cupy.ndarray((num_bytes,), np.uint8, allocate(num_bytes))


def allocate(num_bytes: int) -> Any:
    """Allocate memory of the card and return a pointer. It is freed with the last array in it.

    Raises: InsufficientMemoryError
    """
    import cupy

    with device_errors():
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_bytes), 0)


def free_bytes() -> int:
    """Free bytes of the current card."""
    import cupy

    with device_errors():
        free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free)


def send(device: Device, target: Any, source: npt.NDArray[Any]) -> None:
    """Queue a copy from the host. You may reuse `source` at once unless it is pinned.

    Shapes: target a C-contiguous array on the card of the bytes of `source`
    """
    source = np.ascontiguousarray(source)
    with device_errors():
        target.data.copy_from_host_async(source.ctypes.data, source.nbytes, device.stream)


class Mailbox:
    """Sends to the card through pinned memory. The host never waits for work queued on the card.

    The memory has two halves. The host fills one while copies from the other may still run.
    """

    def __init__(self, device: Device, half_bytes: int):
        import cupy

        self._device = device
        self._halves = [pinned_bytes(half_bytes), pinned_bytes(half_bytes)]
        self._addresses = [half.ctypes.data for half in self._halves]
        self._are_sent = [cupy.cuda.Event(disable_timing=True) for _ in self._halves]
        self._half, self._begin = 0, 0

    def send(self, target: Any, source: npt.NDArray[Any]) -> None:
        """Queue a copy from the host; you may reuse `source` at once.

        Shapes: target a C-contiguous array on the card of the bytes of `source`
        """
        raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for first in range(0, len(raw), len(self._halves[0])):
            part = raw[first : first + len(self._halves[0])]
            place, address = self._take(len(part))
            place[:] = part
            with device_errors():
                (target.data + first).copy_from_host_async(address, len(part), self._device.stream)

    def send_rows(self, target: Any, sources: Sequence[npt.NDArray[Any]]) -> None:
        """Queue one copy of all sources, each into a row of `target`; you may reuse them at once.

        Shapes: target uint8 [len(sources), bytes of each source], with any distance between rows
        """
        width = sources[0].nbytes
        if len(sources) == 1 or len(sources) * width > len(self._halves[0]):
            for row, source in zip(target, sources, strict=True):
                self.send(row, source)
            return
        place, address = self._take(len(sources) * width)
        for row, source in zip(place.reshape(len(sources), width), sources, strict=True):
            row[:] = source.view(np.uint8)
        _copy_rows(self._device, target, (address, width), width, len(sources), _HOST_TO_DEVICE)

    def _take(self, num_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Take up to half of the pinned memory; return it and its address."""
        if self._begin + num_bytes > len(self._halves[0]):
            self._turn()
        begin = self._begin
        self._begin += -(-num_bytes // 16) * 16
        return self._halves[self._half][begin : begin + num_bytes], self._addresses[self._half] + begin

    def _turn(self) -> None:
        with device_errors():
            self._are_sent[self._half].record(self._device.stream)
            self._half, self._begin = 1 - self._half, 0
            self._are_sent[self._half].synchronize()


def pinned_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate pinned host memory, which the card copies from and to by itself. It holds zeros."""
    import cupy

    with device_errors():
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, num_bytes)
    return array


def fetch(device: Device, source: Any) -> npt.NDArray[Any]:
    """Copy an array of the card to the host, after all queued work. Shapes: result as source."""
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
    _copy_rows(device, target, (source.data.ptr, source.strides[0]), num_bytes, len(source), _DEVICE_TO_DEVICE)


def _copy_rows(device: Device, target: Any, source: tuple[int, int], num_bytes: int, num_rows: int, kind: int) -> None:
    """Queue a copy of rows, from an address and the distance of rows there."""
    import cupy

    sizes = num_bytes, num_rows, kind, device.stream.ptr
    with device_errors():
        cupy.cuda.runtime.memcpy2DAsync(target.data.ptr, target.strides[0], *source, *sizes)
