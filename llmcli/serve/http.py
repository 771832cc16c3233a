"""`HttpServer`: uvicorn with our ends: a signal, and connections that send or take nothing, or too much."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 30.0  # for a request to arrive on an open connection; also how long an unused one is kept
CLOSE_SECONDS = 10.0  # for the rest of an answer to be read after its connection was closed
_MAX_HEAD_BYTES = 64 * 1024  # of a request, beside what comes with its first byte
_MAX_PIPELINED = 16  # requests that a connection may send before the answer of the one before
_LAST_WORD_SECONDS = 0.3  # to tell clients that the server has ended
_TICK_SECONDS = 0.05
END_SIGNAL = signal.SIGUSR1  # others are for the engine's process, which passes them on by this one


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Refuses what the parser would keep without a bound: endless headers, trailers and pipelines."""

    _num_unbound = 0  # bytes since the latest ones of a body, or since the beginning of the request

    def on_message_begin(self) -> None:
        """A request begins."""
        self._num_unbound = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Content, whose length the service bounds."""
        self._num_unbound = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self._num_unbound += len(data)
        super().data_received(data)
        too_much = self._num_unbound > _MAX_HEAD_BYTES or len(self.pipeline) > _MAX_PIPELINED
        if too_much and not self.transport.is_closing():
            self.send_400_response("The head of a request is too long, or too many requests wait.")


class HttpServer(uvicorn.Server):
    """Serves an application on a socket until END_SIGNAL, and then what is under way for `grace_seconds`.

    A second signal ends it at once. What is left then, or at the end of the grace, is cancelled.
    """

    def __init__(self, app: ASGIApp, *, grace_seconds: float, max_connections: int, on_ready: Callable[[], None]):
        """`on_ready` is called once the server listens."""
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL + 1,  # the gate logs
            access_log=False,
            server_header=False,
            limit_concurrency=max_connections,
            timeout_keep_alive=int(HEADER_SECONDS),
            timeout_graceful_shutdown=grace_seconds,  # type: ignore[arg-type]  # it is passed on to asyncio
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._idle_since: dict[tuple[Any, Any], float] = {}  # by connection and its latest request
        self._closing_since: dict[Any, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signal as the class says; uvicorn itself takes others, and would raise them again at the end."""
        usual = signal.signal(END_SIGNAL, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(END_SIGNAL, usual)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal: the first one ends the service, the second one everything."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def end_within(self, seconds: float) -> None:
        """End the service; what has failed by now has so long to be told."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]  # as above
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as the class says. What is cancelled has a moment to tell its client, and to log."""
        ending = asyncio.ensure_future(super().shutdown(sockets))
        await asyncio.sleep(0)  # from here on it takes no more clients
        # uvicorn looks at `force_exit` too, but from Python 3.12 on goes on waiting for connections to close.
        while not (ending.done() or self.force_exit):
            await asyncio.wait((ending,), timeout=_TICK_SECONDS)
        tasks = set(self.server_state.tasks)
        if not ending.done():
            ending.cancel()
            _cancel(tasks)
        with contextlib.suppress(asyncio.CancelledError):
            await ending
        for _ in range(2):
            if tasks:
                _, tasks = await asyncio.wait(tasks, timeout=_LAST_WORD_SECONDS)
                _cancel(tasks)  # their clients do not read

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's tick, every 0.1 s."""
        if counter % 10 == 0:
            self._close_stale(time.monotonic())
        return await super().on_tick(counter)

    def _close_stale(self, now: float) -> None:
        """Close connections that send no request, and drop closed ones whose client does not read."""
        connections: Collection[Any] = self.server_state.connections
        # A connection waits anew behind each answer: that is another `cycle`.
        idle = {(one, one.cycle) for one in connections if one.cycle is None or one.cycle.response_complete}
        self._idle_since = {key: self._idle_since.get(key, now) for key in idle}
        closing = {one for one in connections if one.transport.is_closing()}
        self._closing_since = {one: self._closing_since.get(one, now) for one in closing}
        for (one, _), since in self._idle_since.items():
            if now - since >= HEADER_SECONDS:
                one.transport.close()
        for one, since in self._closing_since.items():
            if now - since >= CLOSE_SECONDS:
                one.transport.abort()


def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
