"""Moves tensors from disk to the card: threads read pieces into pinned memory while earlier pieces are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.kernels.device import Device, device_errors
from llmcli.runners.cuda.arena import send


@dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor; `take` queues what they are for, once they are on the card as uint8 [num_bytes]."""

    info: TensorInfo
    begin: int
    num_bytes: int
    take: Callable[[Any], None]


class Slot:
    """Room for one piece, on the host and on the card. Used by one thread at a time."""

    def __init__(self, device: Device, on_card: Any):
        self._device = device
        self._on_card = on_card
        self._pinned = pinned_bytes(on_card.size)
        self._reader = TensorReader()
        self._is_free = cupy.cuda.Event(disable_timing=True)
        self._is_used = False

    def read(self, piece: Piece) -> None:
        """Fill the host's half, when the card is done with what was in it."""
        if self._is_used:
            self._is_free.synchronize()
        self._reader.read_range_into(piece.info, piece.begin, self._pinned[: piece.num_bytes].data)

    def hand_over(self, piece: Piece) -> None:
        """Queue the copy and what the piece is for."""
        on_card = self._on_card[: piece.num_bytes]
        send(self._device, on_card, self._pinned[: piece.num_bytes])
        piece.take(on_card)
        with device_errors():
            self._is_free.record(self._device.stream)
        self._is_used = True

    def close(self) -> None:
        """Close the files."""
        self._reader.__exit__(None, None, None)


def pinned_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Host memory that the card copies from and to by itself; zeros at first."""
    with device_errors():
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, num_bytes)
    return array


def upload(device: Device, pieces: Iterable[Piece], on_card: Sequence[Any], on_bytes: Callable[[int], None]) -> None:
    """Move all pieces, in order, and wait for the last; `on_bytes` is told how many have been read.

    Shapes: on_card uint8 arrays, each of at least the largest piece
    Raises: CheckpointError for read errors; DeviceError
    """
    slots = [Slot(device, array) for array in on_card]
    pending: deque[tuple[Piece, Slot, Future[None]]] = deque()
    done = 0

    def finish_oldest() -> None:
        nonlocal done
        piece, slot, reading = pending.popleft()
        reading.result()
        slot.hand_over(piece)
        done += piece.num_bytes
        on_bytes(done)

    pool = ThreadPoolExecutor(len(slots), "read weights")
    try:
        for index, piece in enumerate(pieces):
            if len(pending) == len(slots):
                finish_oldest()
            slot = slots[index % len(slots)]
            pending.append((piece, slot, pool.submit(slot.read, piece)))
        while pending:
            finish_oldest()
    finally:
        # Nobody may read or copy any more when the memory goes.
        pool.shutdown(cancel_futures=True)
        device.synchronize()
        for slot in slots:
            slot.close()
