"""`Server`: one server from its first connection to its end: the engine in this process, the front in another."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from types import FrameType, TracebackType

from llmcli.child import child_program
from llmcli.errors import LLMCliError
from llmcli.serve.engine_end import EngineEnd, Hold
from llmcli.serve.front import FrontWork
from llmcli.serve.http import END_SIGNAL
from llmcli.serve.worker import Scheduler

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_SECONDS = 5.0  # for the front's process, once the link is closed
_FORCE_SECONDS = 4.0  # after a second signal, for the front; twice as long for this process

# glibc keeps what large bodies took, unless it is told to take each from the system.
_GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
_FRONT = child_program("llmcli.serve.front", "main(*map(int, sys.argv[1:]))")


class Server:
    """Starts the front at once, so that it imports and opens what it needs while the weights load; see `run`."""

    def __init__(self, listener: socket.socket, work: FrontWork):
        """Hand over `listener`, a bound socket. Closes the front at the end of a `with`."""
        self._connection, there = Pipe()
        numbers = (there.fileno(), listener.fileno())
        # -P leaves the working directory out of the search for modules. In a session of its own the front gets no
        # Ctrl-C from the terminal.
        self._front = subprocess.Popen(
            [sys.executable, "-P", "-c", _FRONT, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            env={**_GIVES_MEMORY_BACK, **os.environ},
            pass_fds=numbers,
            start_new_session=True,
        )
        there.close()
        listener.close()  # the front alone has it: once it takes no more clients, they are refused
        self._connection.send(work)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        try:
            self._front.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._front.kill()
            self._front.wait()

    def run(
        self,
        scheduler: Scheduler,
        hold: Hold,
        *,
        log: Callable[[str], None],
        log_contents: Callable[[str, object], None],
        on_ready: Callable[[], None],
    ) -> list[int]:
        """Serve until a SIGTERM or Ctrl-C; return the signals that came. A second one ends what is under way.

        After the second, whatever hangs is ended by force: the front, and some seconds later this process.

        `hold` is as for `EngineEnd`.

        Raises: LLMCliError if the front's process ends by itself
        """
        signals: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            self._front.send_signal(END_SIGNAL)
            if len(signals) == 2:
                self._end_by_force()

        usual = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        try:
            EngineEnd(self._connection, scheduler, hold).run(log=log, log_contents=log_contents, on_ready=on_ready)
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
        if not signals:
            raise LLMCliError("the process that serves connections has ended; start the server again")
        return signals

    def _end_by_force(self) -> None:
        """Begin to count the seconds. This process is ended by a thread of C, which waits for no lock of Python."""
        timer = threading.Timer(_FORCE_SECONDS, self._front.kill)
        timer.daemon = True
        timer.start()
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the traceback says nothing to a user
        faulthandler.dump_traceback_later(2 * _FORCE_SECONDS, exit=True, file=nowhere)
