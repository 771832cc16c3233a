"""Keeps keys typed during an answer off the screen, on POSIX systems.

They wait for the next prompt line; a Ctrl-C discards them, as terminals do.
"""

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from llmcli.cli.terminal import no_interrupts

# Signals that end or stop the process: its terminal then goes to another.
LEAVING = (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP)


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Echo no keys of standard input, a terminal, inside.

    The echo is back whenever this process ends or stops, for any reason but a SIGKILL.
    """
    descriptor = sys.stdin.fileno()
    if not termios.tcgetattr(descriptor)[3] & termios.ECHO:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        """Die or stop of the signal, as without a handler."""
        _set_echo(descriptor, True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, leave)

    def come_back(number: int, frame: FrameType | None) -> None:
        _set_echo(descriptor, False)

    handlers = {**dict.fromkeys(LEAVING, leave), signal.SIGCONT: come_back}
    ours = [number for number in handlers if signal.getsignal(number) == signal.SIG_DFL]  # nohup ignores some
    try:
        for number in ours:
            signal.signal(number, handlers[number])
        _set_echo(descriptor, False)
        yield
    finally:
        with no_interrupts():
            _set_echo(descriptor, True)
            for number in ours:
                signal.signal(number, signal.SIG_DFL)


def discard_typed_keys() -> None:
    """Forget the keys that wait on standard input, a terminal.

    They are read, unfinished lines too. `tcflush` would also drop a Ctrl-C that the terminal has not looked at yet.
    """
    descriptor = sys.stdin.fileno()
    usual, by_key = termios.tcgetattr(descriptor), termios.tcgetattr(descriptor)
    by_key[3] &= ~termios.ICANON
    by_key[6][termios.VMIN], by_key[6][termios.VTIME] = 0, 0
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, by_key)
        while os.read(descriptor, 4096):
            pass
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, usual)


def _set_echo(descriptor: int, is_on: bool) -> None:
    if os.tcgetpgrp(descriptor) != os.getpgrp():  # a job in the background: the terminal is someone else's
        return
    settings = termios.tcgetattr(descriptor)
    settings[3] = settings[3] | termios.ECHO if is_on else settings[3] & ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, settings)
