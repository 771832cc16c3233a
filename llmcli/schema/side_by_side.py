"""`run_side_by_side`: short calls into a library, shared among threads that wait for them.

A pool of futures costs more than many of these calls take: here threads take the next call from one list themselves.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

MAX_HELPERS = 7  # beside the thread that asks
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run_side_by_side(jobs: Sequence[Job]) -> None:
    """Call all functions with their arguments, each once, in no order. They let other threads go on, and do not raise.

    A Ctrl-C leaves out what has not begun, and waits for what has: nothing works on their arguments afterwards.
    """
    rest = iter(jobs)  # its next item goes to one thread
    helpers = _helpers()[: len(jobs) - 1]
    try:
        for helper in helpers:
            helper.lists.put(rest)
        _run(rest)
    finally:
        for _ in rest:
            pass
        for helper in helpers:
            with helper.is_busy:
                pass


class _Helper(Thread):
    def __init__(self) -> None:
        super().__init__(name="masks", daemon=True)
        self.lists: SimpleQueue[Iterator[Job]] = SimpleQueue()
        self.is_busy = Lock()

    def run(self) -> None:
        while True:
            rest = self.lists.get()
            with self.is_busy:
                _run(rest)


def _run(rest: Iterator[Job]) -> None:
    for function, arguments in rest:
        function(*arguments)


@cache
def _helpers() -> tuple[_Helper, ...]:
    """As many as there are other cores."""
    num_cores = os.cpu_count() or 1
    with suppress(AttributeError):  # not on every system
        num_cores = len(os.sched_getaffinity(0))
    helpers = tuple(_Helper() for _ in range(min(num_cores - 1, MAX_HELPERS)))
    for helper in helpers:
        helper.start()
    return helpers
