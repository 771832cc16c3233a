"""The mailbox: data for the card in pinned memory arrives whole, in order, and is not overwritten before."""

import ctypes
import functools
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
arena = pytest.importorskip("llmcli.runners.cuda.step.arena")

HALF_BYTES = 4096


@pytest.mark.cuda
def test_everything_arrives_whole_and_in_order(device):
    """Far more than its halves hold is sent at a time; of two values for one place the second stays."""
    mailbox = arena.Mailbox(device, HALF_BYTES)
    rng = np.random.default_rng(9)
    target, expected = cupy.zeros(50_000, cupy.uint8), np.zeros(50_000, np.uint8)
    snapshots = [cupy.empty_like(target) for _ in range(20)]
    states = []
    for snapshot in snapshots:
        for size in rng.choice([1, 15, 16, 17, 1000, HALF_BYTES - 1, HALF_BYTES, HALF_BYTES + 1, 30_000], 20):
            first = int(rng.integers(len(expected) - size))
            source = rng.integers(0, 256, size, np.uint8)
            mailbox.send(target[first : first + size], source)
            expected[first : first + size] = source
            source[:] = 0  # the caller may use it again at once
        arena.copy(device, snapshot, target)
        states.append(expected.copy())
    device.synchronize()
    for snapshot, state in zip(snapshots, states, strict=True):
        assert snapshot.get().tobytes() == state.tobytes()


class LateCard:
    """Copies and events wait in a queue, as on a card that lags; a host that waits for an event is served."""

    def __init__(self):
        self.stream, self.ptr = self, 0
        self.queued = []
        self.num_waits = 0

    def target(self, memory, first=0):
        """An array's place, as far as the mailbox uses it."""
        return SimpleNamespace(data=LatePointer(self, memory, first))

    def event(self, **options):
        return LateEvent(self)

    def work_off(self, until=None):
        while self.queued:
            operation = self.queued.pop(0)
            if operation is until:
                return
            if not isinstance(operation, LateEvent):
                operation()


class LatePointer:
    def __init__(self, card, memory, first):
        self.card, self.memory, self.first = card, memory, first

    def __add__(self, count):
        return LatePointer(self.card, self.memory, self.first + count)

    def copy_from_host_async(self, address, num_bytes, stream):
        source = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
        place = self.memory[self.first : self.first + num_bytes]
        self.card.queued.append(lambda: place.__setitem__(slice(None), source))


class LateEvent:
    def __init__(self, card):
        self.card = card

    def record(self, stream):
        self.card.queued.append(self)

    def synchronize(self):
        if self in self.card.queued:
            self.card.num_waits += 1
            self.card.work_off(self)


@pytest.fixture
def late_card(monkeypatch):
    card = LateCard()
    monkeypatch.setattr(arena, "pinned_bytes", lambda num_bytes: np.zeros(num_bytes, np.uint8))
    monkeypatch.setattr(cupy.cuda, "Event", card.event)
    return card


@pytest.mark.parametrize("size", [1, 16, 60, 63, 64, 65, 128, 1000])
def test_nothing_is_overwritten_before_it_has_been_copied(late_card, size):
    mailbox = arena.Mailbox(late_card, 64)
    rng = np.random.default_rng(size)
    memory, expected = np.zeros(5000, np.uint8), np.zeros(5000, np.uint8)
    for number in range(30):
        source = rng.integers(1, 256, size if number % 3 else 7, np.uint8)
        first = int(rng.integers(len(memory) - len(source)))
        mailbox.send(late_card.target(memory, first), source)
        expected[first : first + len(source)] = source
        source[:] = 0
    late_card.work_off()
    assert memory.tobytes() == expected.tobytes()


class LateRows:
    """Rows of the card's memory that lie apart, as far as the mailbox uses them."""

    def __init__(self, card, memory):
        self.card, self.memory = card, memory
        self.data, self.strides = SimpleNamespace(ptr=memory.ctypes.data), memory.strides

    def __iter__(self):
        return (self.card.target(row) for row in self.memory)


@pytest.mark.parametrize("width", [1, 7, 16, 20, 32, 33, 100])
def test_rows_that_lie_apart_have_one_copy(late_card, monkeypatch, width):
    num_copies = 0

    def copy_rows(target, pitch, source, source_pitch, width, height, kind, stream):
        nonlocal num_copies
        num_copies += 1
        assert (source_pitch, kind, stream) == (width, 1, 0)
        assert height * width <= 64
        for row in range(height):
            pair = target + row * pitch, source + row * width
            late_card.queued.append(functools.partial(ctypes.memmove, *pair, width))

    monkeypatch.setattr(cupy.cuda.runtime, "memcpy2DAsync", copy_rows)
    mailbox, rng = arena.Mailbox(late_card, 64), np.random.default_rng(width)
    memory, expected = np.zeros((6, 300), np.uint8), np.zeros((6, 300), np.uint8)
    for count in (2, 1, 3, 2, 6, 3) * 4:
        sources = rng.integers(1, 256, (count, width), np.uint8)
        first, begin = int(rng.integers(7 - count)), int(rng.integers(300 - width))
        mailbox.send_rows(LateRows(late_card, memory[first : first + count, begin : begin + width]), list(sources))
        expected[first : first + count, begin : begin + width] = sources
        sources[:] = 0
    late_card.work_off()
    assert memory.tobytes() == expected.tobytes()
    assert num_copies == 4 * sum(count > 1 and count * width <= 64 for count in (2, 1, 3, 2, 6, 3))


def test_the_host_waits_for_the_half_that_it_fills_only(late_card):
    mailbox = arena.Mailbox(late_card, 64)
    memory = np.zeros(16, np.uint8)
    for _ in range(8):  # two halves
        mailbox.send(late_card.target(memory), np.ones(16, np.uint8))
    assert (late_card.num_waits, memory.any()) == (0, False)
    mailbox.send(late_card.target(memory), np.ones(16, np.uint8))
    assert late_card.num_waits == 1
    assert len(late_card.queued) == 4 + 1 + 1  # the second half's copies, its event, the new one
