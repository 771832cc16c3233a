"""Moves pieces of tensors to the card: threads read them into pinned memory while earlier ones are being copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import cupy
import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.reader import TensorReader
from llmcli.kernels.device import Device, device_errors
from llmcli.runners.cuda.step.arena import pinned_bytes, send
from llmcli.timeline import Timeline


@dataclass(frozen=True)
class UploadPiece:
    """Some bytes for the card.

    `read` fills host memory, uint8 [num_bytes], in any thread; `take` queues the work on the bytes, once they are on
    the card as uint8 [num_bytes]. `file_bytes` of the files are done with that.
    """

    num_bytes: int
    file_bytes: int
    read: Callable[[TensorReader, npt.NDArray[np.uint8]], None]
    take: Callable[[Any], None]


class Slot:
    """Room for one piece, on the host and on the card. Used by one thread at a time."""

    def __init__(self, device: Device, on_card: Any, timeline: Timeline, reader: TensorReader):
        self._device = device
        self._on_card = on_card
        self._timeline = timeline
        self._pinned: npt.NDArray[np.uint8] | None = None
        self._reader = reader
        self._is_free = cupy.cuda.Event(disable_timing=True)

    def read(self, piece: UploadPiece) -> float:
        """Fill the host's half when the card is done with its last content; returns when that was, by the timeline."""
        if self._pinned is None:
            began = self._timeline.now()
            # In the readers' threads: pinning takes the system long, and each needs its own.
            with self._timeline.beside("pinned memory"):
                self._pinned = pinned_bytes(self._on_card.size)
        else:
            with device_errors():
                self._is_free.synchronize()
            began = self._timeline.now()
        piece.read(self._reader, self._pinned[: piece.num_bytes])
        return began

    def hand_over(self, piece: UploadPiece) -> None:
        """Queue the copy and the piece's work."""
        assert self._pinned is not None
        on_card = self._on_card[: piece.num_bytes]
        send(self._device, on_card, self._pinned[: piece.num_bytes])
        piece.take(on_card)
        with device_errors():
            self._is_free.record(self._device.stream)

    def close(self) -> None:
        """Close the files."""
        self._reader.__exit__(None, None, None)


class Upload:
    """Pieces on their way to the card, one reading thread a slot; a `with` block bounds their work.

    The threads fill the slots at once. `run` queues the pieces' work in their order, so that this work can be prepared
    meanwhile. Memory is that of the slots, however many pieces there are. `open_reader` opens what a slot reads from.
    Shapes: on_card uint8 arrays, each of at least the largest piece
    """

    def __init__(
        self,
        device: Device,
        pieces: Iterable[UploadPiece],
        on_card: Sequence[Any],
        timeline: Timeline,
        open_reader: Callable[[], TensorReader] = TensorReader,
    ):
        self._device = device
        self._timeline = timeline
        self._slots = [Slot(device, array, timeline, open_reader()) for array in on_card]
        self._pool = ThreadPoolExecutor(len(self._slots), "read weights", initializer=device.activate)
        self._pieces = iter(pieces)
        self._pending: deque[tuple[UploadPiece, Slot, Future[float]]] = deque()

    def __enter__(self) -> Self:
        for slot in self._slots:
            self._read_next(slot)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # No read or copy may still run when the memory is freed.
        self._pool.shutdown(cancel_futures=True)
        self._device.synchronize()
        for slot in self._slots:
            slot.close()

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """Move all pieces, in order, and wait for the last; `on_bytes` gets how many of the files' bytes are done.

        The timeline gets each wait: for a read, or for the card, while it uses memory that the next read overwrites.
        Raises: CheckpointError for read errors, and as the pieces' `read`; DeviceError
        """
        done = 0
        with self._timeline.part("upload and repack"):
            while self._pending:
                piece, slot, reading = self._pending.popleft()
                waiting = self._timeline.now()
                self._timeline.since("read", max(reading.result(), waiting))
                slot.hand_over(piece)
                self._read_next(slot)
                done += piece.file_bytes
                on_bytes(done)
            self._device.synchronize()

    def _read_next(self, slot: Slot) -> None:
        piece = next(self._pieces, None)
        if piece is not None:
            self._pending.append((piece, slot, self._pool.submit(slot.read, piece)))
