"""A moment in which Ctrl-C does nothing, for what must not be left half done at the end of an answer."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not cost what the first one keeps."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
