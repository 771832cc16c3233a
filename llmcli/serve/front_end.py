"""`FrontEnd`: the front's end of the link to the engine, which runs in another process. For the event loop's thread."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from llmcli.engine.events import Event, Failed, Token
from llmcli.engine.request import Request
from llmcli.errors import DeviceError, LLMCliError
from llmcli.serve.engine_end import EngineState
from llmcli.serve.sender import Sender

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

_MOST_MESSAGES = 16  # taken at a time: a small model may write them as fast as they are read
_LOST = DeviceError("the process that generates has ended")

# What has happened since the last call, by the number of the request.
Take = Callable[[Sequence[tuple[int, Event]]], None]


class FrontEnd:
    """See the module. Make it in the running event loop, once the engine has begun.

    Attributes: fault: set once the device cannot go on; begin_state: the engine's at the beginning;
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
        self._open: set[int] = set()  # requests that nobody has forgotten
        self._loop = asyncio.get_running_loop()
        self._state: asyncio.Future[EngineState] | None = None  # that all who ask wait for
        self._loop.add_reader(connection.fileno(), self._read)

    def submit(self, request: Request, grammar: Grammar | None = None) -> int:
        """Queue a request, held to `grammar`; return its number.

        Events end with a `Finished` for each sample, or one `Failed` for all.
        """
        key = next(self._numbers)
        self._open.add(key)
        self._sender.send("submit", key, request, grammar)
        return key

    def cancel(self, key: int) -> None:
        """Forget a request, and drop what is left of it before the next step; events may still be on their way."""
        self._open.discard(key)
        self._sender.send("cancel", key)

    async def state(self) -> EngineState:
        """What the engine counts now. Raises: LLMCliError if its process has ended"""
        if self.is_lost:
            raise _LOST
        if self._state is None or self._state.done():
            self._state = self._loop.create_future()
            self._sender.send("state")
        return await asyncio.shield(self._state)

    def log(self, line: str) -> None:
        """Write a line where the server logs."""
        self._sender.send("log", line)

    def log_contents(self, what: str, contents: object) -> None:
        """Log contents of requests and answers."""
        self._sender.send("contents", what, contents)

    def say_ready(self) -> None:
        """Say that clients can come."""
        self._sender.send("ready")

    def close(self) -> None:
        """Close this end for writing, which ends the engine. It closes the other end once it has ended."""
        self._loop.remove_reader(self._connection.fileno())
        self._sender.close()
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Take messages that are there, a few at most: a late process joins pieces, and clients still have turns."""
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
                self._state.exception()  # taken here too: perhaps nobody waits for it any more
            self.take([*events, *((key, Failed(0, _LOST)) for key in self._open)])
            self._on_lost()
