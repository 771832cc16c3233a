"""Keeps the keys that are typed during an answer off the screen.

They wait for the next prompt line; a Ctrl-C discards them, as terminals do.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from llmcli.runners.interrupts import interrupts_held_back

if sys.platform != "win32":
    import termios

    # What ends the process at once, or stops it for a while: its terminal goes to someone else then.
    _ENDS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)

    class _Echo:
        def __init__(self, descriptor: int):
            self._descriptor = descriptor
            self._had_echo = self._flags() & termios.ECHO

        def switch(self, is_on: bool) -> None:
            if not self._had_echo or os.tcgetpgrp(self._descriptor) != os.getpgrp():  # a job in the background
                return
            settings = termios.tcgetattr(self._descriptor)
            settings[3] = settings[3] | termios.ECHO if is_on else settings[3] & ~termios.ECHO
            termios.tcsetattr(self._descriptor, termios.TCSANOW, settings)

        def _flags(self) -> int:
            return int(termios.tcgetattr(self._descriptor)[3])

    @contextmanager
    def keys_unseen() -> Iterator[None]:
        """Echo no keys inside, unless standard input is no terminal. The echo is back whenever this process ends,
        stops at Ctrl-Z, or gives the terminal away, but for a SIGKILL."""
        if not sys.stdin.isatty():
            yield
            return
        echo = _Echo(sys.stdin.fileno())

        def leave(number: int, frame: FrameType | None) -> None:
            """Die or stop of the signal, as without a handler."""
            echo.switch(True)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, leave)

        def come_back(number: int, frame: FrameType | None) -> None:
            echo.switch(False)

        handlers = {**dict.fromkeys((*_ENDS, signal.SIGTSTP), leave), signal.SIGCONT: come_back}
        ours = [number for number in handlers if signal.getsignal(number) == signal.SIG_DFL]  # nohup has other wishes
        try:
            for number in ours:
                signal.signal(number, handlers[number])
            echo.switch(False)
            yield
        finally:
            with interrupts_held_back():
                echo.switch(True)
                for number in ours:
                    signal.signal(number, signal.SIG_DFL)

else:

    @contextmanager
    def keys_unseen() -> Iterator[None]:
        """A console of Windows echoes only while it is read."""
        yield
