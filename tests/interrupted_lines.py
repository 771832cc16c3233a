"""Work that a Ctrl-C interrupts before one of its lines."""

import signal
import sys
from collections.abc import Callable
from typing import Any


def strike_at(files: tuple[str, ...], moment: int, work: Callable[[], Any]) -> bool:
    """Do the work with a Ctrl-C before its line of that number in these files; False if it has fewer."""
    left = moment

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0
