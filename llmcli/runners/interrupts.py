"""Ctrl-C held back for a moment, while several values change together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C that comes inside strike at the end. In other threads, which get none, nothing changes."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            usual(signal.SIGINT, held[0])
