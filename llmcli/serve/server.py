"""`Server`: runs from the first connection to the end, with the engine in this process, the front in another."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from queue import SimpleQueue
from types import FrameType

from llmcli.engine.remote.link import EngineEnd
from llmcli.engine.remote.worker import Hold
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import LLMCliError
from llmcli.patterns import child_program
from llmcli.serve.front import SIGNALS, FrontWork

_END_SECONDS = 5.0  # for the front's process, once the link is closed
_FORCE_SECONDS = 4.0  # for the front, after a second signal

# glibc keeps the memory of large bodies, unless set to take each from the system.
_GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
_FRONT = child_program("llmcli.serve.front", "main(*map(int, sys.argv[1:]))")


class Server:
    """Starts the front at once, so that it imports and opens what it needs while the weights load; see `run`."""

    def __init__(self, listener: socket.socket, work: FrontWork):
        """Hand over `listener`, a bound socket. Closes the front at the end of a `with`."""
        self._connection, there = Pipe()
        self._signals, signals = socket.socketpair()
        self._signals.setblocking(False)
        numbers = (there.fileno(), listener.fileno(), signals.fileno())
        # -P leaves the working directory out of the search for modules. In its own session the front gets no Ctrl-C
        # from the terminal.
        self._front = subprocess.Popen(
            [sys.executable, "-P", "-c", _FRONT, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            env={**_GIVES_MEMORY_BACK, **os.environ},
            pass_fds=numbers,
            start_new_session=True,
        )
        there.close()
        signals.close()
        listener.close()  # only the front has it: once it takes no more clients, they are refused
        self._connection.send(work)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._signals.close()
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
        """Serve until a SIGTERM or Ctrl-C; return the signals received. A second one ends what is under way.

        After the second, a front that hangs is killed. An engine that hangs is killed by the front.
        `hold` is as for `EngineEnd`.

        Raises: LLMCliError if the front's process ends by itself
        """
        numbers: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            numbers.append(number)
            if len(numbers) == 2:
                timer = threading.Timer(_FORCE_SECONDS, self._front.kill)
                timer.daemon = True
                timer.start()

        usual = {number: signal.signal(number, note) for number in SIGNALS}
        # Python's own handler in C informs the front, even while all threads wait for one that hangs.
        usual_socket = signal.set_wakeup_fd(self._signals.fileno())
        try:
            EngineEnd(self._connection, scheduler, hold).run(log=log, log_contents=log_contents, on_ready=on_ready)
        finally:
            signal.set_wakeup_fd(usual_socket)
            for number, handler in usual.items():
                signal.signal(number, handler)
        if not numbers:
            raise LLMCliError("the process that serves connections has ended; start the server again")
        return numbers


# `LogWriter`: writes the log in its own thread. A log that nobody reads must not stop the server.

_MOST_CHARACTERS = 16 * 1024**2  # waiting
_CLOSE_SECONDS = 2.0


class LogWriter:
    """See above. Lines that find no room are counted; the log reports how many are missing."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._num_missing = 0
        self._num_queued = 0  # characters, counted by `log`
        self._num_written = 0  # counted by the thread
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def log(self, line: str) -> None:
        """Queue a line. Never waits. For one thread."""
        if self._num_queued - self._num_written > _MOST_CHARACTERS:
            self._num_missing += 1
            return
        if self._num_missing:
            self._put(f"{self._num_missing} lines are missing here, as nobody read the log")
            self._num_missing = 0
        self._put(line)

    def close(self) -> bool:
        """Write what is queued. False if nobody reads it: then the thread is stuck for good."""
        self._lines.put(None)
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _put(self, line: str) -> None:
        self._num_queued += len(line)
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            self._num_written += len(line)
