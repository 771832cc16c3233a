"""The upload: pieces arrive whole and in order through few slots, and it ends cleanly after any fault."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from llmcli.checkpoint.safetensors_file import TensorInfo  # noqa: E402
from llmcli.errors import CheckpointError, InsufficientMemoryError  # noqa: E402
from llmcli.runners.cuda.load import upload  # noqa: E402
from llmcli.runners.cuda.load.upload import Upload, UploadPiece  # noqa: E402
from llmcli.runners.cuda.load.weight_pieces import read_bytes  # noqa: E402
from llmcli.timeline import Timeline  # noqa: E402

PIECE_BYTES = 1000
NUM_SLOTS = 3


class CardDevice:
    """A card that copies at once, and is done with it after `busy_seconds`."""

    def __init__(self) -> None:
        self.stream = SimpleNamespace(free_at=0.0)
        self.busy_seconds = 0.0
        self.active_in: set[int] = set()
        self.num_synchronized = 0

    def activate(self) -> None:
        self.active_in.add(threading.get_ident())

    def synchronize(self) -> None:
        self.num_synchronized += 1


class Event:
    free_at = 0.0

    def record(self, stream: Any) -> None:
        self.free_at = stream.free_at

    def synchronize(self) -> None:
        time.sleep(max(self.free_at - time.perf_counter(), 0.0))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CardDevice:
    card = CardDevice()

    def send(device: CardDevice, target: np.ndarray, source: np.ndarray) -> None:
        target[:] = source
        device.stream.free_at = max(device.stream.free_at, time.perf_counter()) + device.busy_seconds

    def pinned_bytes(num_bytes: int) -> np.ndarray:
        assert threading.get_ident() in card.active_in  # memory belongs to the thread's current card
        return np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr(upload, "send", send)
    monkeypatch.setattr(upload, "pinned_bytes", pinned_bytes)
    monkeypatch.setattr(upload.cupy.cuda, "Event", lambda **options: Event())
    return card


class Weights:
    """A file of `count` pieces, the last one short, and what has arrived of them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.bytes = np.random.default_rng(0).integers(0, 256, count * PIECE_BYTES - 300, np.uint8)
        path = folder / "model.safetensors"
        path.write_bytes(bytes(64) + self.bytes.tobytes())
        self.info = TensorInfo("weights", "U8", self.bytes.shape, path, 64, self.bytes.size)
        self.arrived: list[bytes] = []
        self.num_begun = 0

    def pieces(self, take: Callable[[Any], None] | None = None) -> Iterator[UploadPiece]:
        for begin in range(0, self.bytes.size, PIECE_BYTES):
            self.num_begun += 1
            count = min(PIECE_BYTES, self.bytes.size - begin)
            read = partial(read_bytes, self.info, begin)
            yield UploadPiece(count, count, read, take or (lambda source: self.arrived.append(source.tobytes())))


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path, 20)


def start(device: CardDevice, pieces: Iterator[UploadPiece], timeline: Timeline | None = None) -> Upload:
    slots = [np.zeros(PIECE_BYTES, np.uint8) for _ in range(NUM_SLOTS)]
    return Upload(device, pieces, slots, timeline or Timeline())  # type: ignore[arg-type]


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read weights")]


def test_every_piece_arrives_in_order(device: CardDevice, weights: Weights) -> None:
    done: list[int] = []
    with start(device, weights.pieces()) as uploading:
        uploading.run(done.append)
    assert b"".join(weights.arrived) == weights.bytes.tobytes()
    assert done == [*range(PIECE_BYTES, weights.bytes.size, PIECE_BYTES), weights.bytes.size]
    assert 1 <= len(device.active_in) <= NUM_SLOTS
    assert reading_threads() == []


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_pieces_than_slots(device: CardDevice, tmp_path: Path, count: int) -> None:
    weights = Weights(tmp_path, count)
    with start(device, weights.pieces()) as uploading:
        uploading.run(lambda done: None)
    assert b"".join(weights.arrived) == weights.bytes.tobytes()


def test_reading_begins_at_once_and_goes_no_further_than_the_slots(device: CardDevice, weights: Weights) -> None:
    with start(device, weights.pieces()):
        assert weights.num_begun == NUM_SLOTS
        assert weights.arrived == []
    assert device.num_synchronized == 1
    assert reading_threads() == []


def test_a_slot_is_read_into_again_only_when_the_card_is_done_with_it(device: CardDevice, weights: Weights) -> None:
    device.busy_seconds = 0.01
    began = time.perf_counter()
    with start(device, weights.pieces()) as uploading:
        uploading.run(lambda done: None)
        # The last piece is read when the one that had its slot has been copied, the seventeenth.
        assert time.perf_counter() - began >= 17 * device.busy_seconds
    assert b"".join(weights.arrived) == weights.bytes.tobytes()


def test_a_file_that_has_shrunk(device: CardDevice, weights: Weights) -> None:
    with weights.info.path.open("r+b") as file:
        file.truncate(64 + 4500)
    with (
        pytest.raises(CheckpointError, match=r"weights in .* ends after 4500 bytes of 19700"),
        start(device, weights.pieces()) as uploading,
    ):
        uploading.run(lambda done: None)
    assert b"".join(weights.arrived) == weights.bytes[:4000].tobytes()
    assert device.num_synchronized == 1
    assert reading_threads() == []


def test_ctrl_c_ends_the_threads(device: CardDevice, weights: Weights) -> None:
    taken = 0

    def take(source: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), start(device, weights.pieces(take)) as uploading:
        uploading.run(lambda done: None)
    assert weights.num_begun == 4 + NUM_SLOTS
    assert device.num_synchronized == 1
    assert reading_threads() == []


def test_no_pinned_memory(device: CardDevice, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned_bytes(num_bytes: int) -> None:
        raise InsufficientMemoryError("no")

    monkeypatch.setattr(upload, "pinned_bytes", pinned_bytes)
    with pytest.raises(InsufficientMemoryError), start(device, weights.pieces()) as uploading:
        uploading.run(lambda done: None)
    assert reading_threads() == []


@pytest.mark.parametrize(("busy_seconds", "read_seconds", "waits_for"), [(0.02, 0.0, "upload"), (0.0, 0.06, "read")])
def test_the_timeline_tells_what_was_waited_for(
    device: CardDevice,
    weights: Weights,
    busy_seconds: float,
    read_seconds: float,
    waits_for: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.busy_seconds = busy_seconds
    read = upload.TensorReader.read_range_into

    def slow_read(self: Any, info: TensorInfo, begin: int, buffer: Any) -> None:
        time.sleep(read_seconds)
        read(self, info, begin, buffer)

    monkeypatch.setattr(upload.TensorReader, "read_range_into", slow_read)
    timeline = Timeline()
    with start(device, weights.pieces(), timeline) as uploading:
        uploading.run(lambda done: None)
    timeline.finish()
    taken = {part.name.split()[0]: part.seconds for part in timeline.parts if not part.is_beside}
    assert taken[waits_for] > 0.8 * sum(taken.values())
    assert sum(taken.values()) > 0.3
    (pinned,) = [part for part in timeline.parts if part.is_beside]
    assert (pinned.name, len(pinned.intervals)) == ("pinned memory", NUM_SLOTS)
