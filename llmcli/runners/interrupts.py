"""Ctrl-C held back for a moment, while several values change together.

A step does so some six times. `signal` looks each handler up in an enumeration, which takes 10 us in all; the module
below it, which has the same functions, takes 2.
"""

import _signal
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C that comes inside strike at the end. In other threads, which get none, nothing changes."""
    usual = _signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[FrameType | None] = []
    _signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, usual)
        if held:
            usual(signal.SIGINT, held[0])
