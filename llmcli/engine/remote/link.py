"""The link between the engine's process and the front's: both ends, and how each writes.

There are two processes because threads of one take turns: serving 256 clients would halve the speed of the rows.
Messages are tuples whose first element is a word.
"""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from llmcli.engine.remote.worker import Hold, Job, Worker, holder
from llmcli.engine.request import Event, Failed, PrefillProgress, Request, Token
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, LLMCliError

if TYPE_CHECKING:
    from llmcli.engine.scheduler import Scheduler
    from llmcli.schema.grammar import Grammar


# `Sender`: writes to one end of the link between two processes, in its own thread.
#
# Both processes read and write one pair of sockets. If a reader waited for its own writes, each process could wait for
# the other for good. So no reader ever waits for a writer.

_MOST_UNSENT = 64  # messages after which `wait_for_room` waits
_CLOSE_SECONDS = 1.0


class Sender:
    """See above. `send` is for any thread, and never waits."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._unsent: deque[tuple[object, ...]] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, *message: object) -> None:
        """Queue a message. It is dropped if the other process has ended, which the reader sees."""
        with self._changed:
            if not self._is_over:
                self._unsent.append(message)
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Wait until few messages are unsent. For a caller that makes many of them and does not read."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._unsent) < _MOST_UNSENT)

    def close(self) -> None:
        """Send what is queued, unless the other process does not read it, and end the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_over)
                if not self._unsent:
                    return
                message = self._unsent[0]  # counts as unsent while it is written
            try:
                self._connection.send(message)
            except BaseException:  # the other process has ended; or a message cannot be sent, and all would hang
                with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                    link.shutdown(socket.SHUT_RDWR)
                with self._changed:
                    self._is_over = True
                    self._unsent.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._unsent.popleft()
                self._changed.notify_all()


# `EngineEnd`: the engine's end of the link. The other end, `FrontEnd`, is in the process that serves clients.

_STEP_SECONDS = 5.0  # for the current step to end


@dataclass(frozen=True)
class EngineState:
    """The engine's counts at one moment."""

    usage: Usage
    num_waiting: int  # texts that have no row yet
    num_pages: int
    free_pages: int


class EngineEnd:
    """Runs a scheduler for the front, until the front closes the link."""

    def __init__(self, connection: Connection, scheduler: "Scheduler", hold: Hold):
        """`hold` is called for requests with a grammar, in its own thread: the first schema takes seconds."""
        self._connection = connection
        self._scheduler = scheduler
        self._hold = hold
        self._worker = Worker(scheduler, self._deliver)
        self._jobs: dict[int, Job] = {}  # by the front's numbers
        self._sender = Sender(connection)

    def run(
        self,
        *,
        log: Callable[[str], None] = lambda line: None,
        log_contents: Callable[[str, object], None] = lambda what, contents: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow the front's messages. `on_ready` is called once it listens; `log` and `log_contents` get its logs."""
        self._sender.send("begin", self._state())
        self._worker.start()
        commands: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "state": lambda: self._sender.send("state", self._state()),
            "log": log,
            "contents": log_contents,
            "ready": on_ready,
        }
        try:
            while True:
                name, *arguments = self._connection.recv()
                commands[name](*arguments)
        except (EOFError, OSError):
            return  # the front has ended
        finally:
            self._worker.stop(_STEP_SECONDS)
            self._sender.close()

    def _submit(self, key: int, request: Request, grammar: "Grammar | None") -> None:
        self._jobs[key] = self._worker.submit(request, key, holder(self._hold, grammar))

    def _cancel(self, key: int) -> None:
        self._worker.cancel(self._jobs.pop(key))

    def _state(self) -> EngineState:
        """Read while a step runs, without waiting: the numbers may be from different moments of it."""
        scheduler, runner = self._scheduler, self._scheduler.runner
        return EngineState(replace(scheduler.usage), scheduler.num_waiting, runner.limits.num_pages, runner.free_pages)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        """Runs in the worker's thread, once a step. Tokens go as tuples: objects of a class take ten times as long."""
        told = [
            (job.key, event.sample, event.token_id, event.text, event.inspection)
            if isinstance(event, Token)
            else (job.key, event)
            for job, event in events
            if not isinstance(event, PrefillProgress)
        ]
        if told or self._worker.fault is not None:
            self._sender.wait_for_room()
            self._sender.send("events", told, self._worker.fault)


# `FrontEnd`: the front's end of the link to the engine in the other process. For the event loop's thread.

_MOST_MESSAGES = 16  # taken at a time: a small model may write them as fast as they are read
_LOST = DeviceError("the process that generates has ended")

# The events since the last call, by the number of the request.
Take = Callable[[Sequence[tuple[int, Event]]], None]


class FrontEnd:
    """See above. Make it in the running event loop, once the engine has begun.

    Attributes: fault: set once the device has failed; begin_state: the engine's at the beginning;
    is_lost: whether the engine's process has ended
    """

    def __init__(self, connection: Connection, begin_state: EngineState, *, on_lost: Callable[[], None]):
        """`on_lost` is called if the engine's process ends, after everything under way has failed."""
        self.fault: LLMCliError | None = None
        self.begin_state = begin_state
        self.take: Take = lambda events: None
        self._connection = connection
        self._sender = Sender(connection)
        self._on_lost = on_lost
        self.is_lost = False
        self._numbers = count(1)
        self._open: set[int] = set()  # requests not forgotten yet
        self._loop = asyncio.get_running_loop()
        self._state: asyncio.Future[EngineState] | None = None  # shared by all that ask
        self._loop.add_reader(connection.fileno(), self._read)

    def submit(self, request: Request, grammar: "Grammar | None" = None) -> int:
        """Queue a request, held to `grammar`; return its number.

        Events end with a `Finished` for each sample, or one `Failed` for all.
        """
        key = next(self._numbers)
        self._open.add(key)
        self._sender.send("submit", key, request, grammar)
        return key

    def cancel(self, key: int) -> None:
        """Forget a request, and drop the rest of it before the next step; events may still be on their way."""
        self._open.discard(key)
        self._sender.send("cancel", key)

    async def state(self) -> EngineState:
        """The engine's counts now. Raises: LLMCliError if its process has ended"""
        if self.is_lost:
            raise _LOST
        if self._state is None or self._state.done():
            self._state = self._loop.create_future()
            self._sender.send("state")
        return await asyncio.shield(self._state)

    def log(self, line: str) -> None:
        """Write a line to the server's log."""
        self._sender.send("log", line)

    def log_contents(self, what: str, contents: object) -> None:
        """Log contents of requests and answers."""
        self._sender.send("contents", what, contents)

    def say_ready(self) -> None:
        """Report that clients can come."""
        self._sender.send("ready")

    def close(self) -> None:
        """Close this end for writing, which ends the engine. The engine then closes the other end."""
        self._loop.remove_reader(self._connection.fileno())
        self._sender.close()
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Take a few of the messages: a late process joins pieces, and clients still get turns."""
        events: list[tuple[int, Event]] = []
        try:
            for _ in range(_MOST_MESSAGES):
                if not self._connection.poll():
                    break
                kind, *arguments = self._connection.recv()
                if kind == "state":
                    assert self._state is not None
                    self._state.set_result(arguments[0])
                    continue
                told, self.fault = arguments
                for key, *event in told:
                    events.append((key, event[0] if len(event) == 1 else Token(*event)))
            self.take(events)
        except (EOFError, OSError):
            self._loop.remove_reader(self._connection.fileno())
            self.is_lost, self.fault = True, _LOST
            if self._state is not None and not self._state.done():
                self._state.set_exception(_LOST)
                self._state.exception()  # retrieved here too: it may be that nobody waits for it any more
            self.take([*events, *((key, Failed(0, _LOST)) for key in self._open)])
            self._on_lost()
