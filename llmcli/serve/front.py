"""The front: the process that talks with clients. `server.py` starts it, next to the engine's process.

The engine's process gets the signals and passes them on by a socket, even while it hangs. When all is served the
engine has some seconds to end; then it is killed. The front also ends, with exit code 1, when the engine is lost.
"""

import asyncio
import contextlib
import gc
import io
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llmcli.engine.remote.link import EngineState, FrontEnd
from llmcli.serve.app import build_app
from llmcli.serve.refusal import Refusal, to_json
from llmcli.serve.service import ClientLimits, Desk, ServedModel, Service

# `HttpServer`: uvicorn, ended by our signals, with bounds on connections that send or take nothing, or too much.

HEADER_SECONDS = 30.0  # for a request to arrive on an open connection; an unused one is kept as long
CLOSE_SECONDS = 10.0  # for the rest of an answer to be read after its connection was closed
_MAX_HEAD_BYTES = 64 * 1024  # of a request, besides what comes with its first byte
_MAX_PIPELINED = 16  # requests that a connection may send before the previous answer
_LAST_WORD_SECONDS = 0.3  # to inform clients that the server has ended
_TICK_SECONDS = 0.05
_LOG_SECONDS = 60.0  # between two lines that say that all connections are in use
ACCEPTED_AT_ONCE = 16  # connections, before they are counted
_QUEUED_BY_SYSTEM = 4096  # connections not accepted yet; one that finds no room there waits for a second


class Connections:
    """Bounds the number of connections. A new one that finds no room replaces the longest idle one."""

    def __init__(self, most: int, log: Callable[[str], None]):
        self.most = most
        self._log = log
        self._log_time = -math.inf

    def make_room(self, new: "BoundedProtocol") -> bool:
        """Drop an idle connection if there are too many with `new`. False if none is idle."""
        if len(new.connections) <= self.most:
            return True
        if time.monotonic() - self._log_time >= _LOG_SECONDS:
            self._log_time = time.monotonic()
            self._log(f"all {self.most} connections are in use; new ones replace idle ones")
        others = (one for one in new.connections if isinstance(one, BoundedProtocol) and one is not new and one.is_idle)
        longest = min(others, key=lambda one: one.active_time, default=None)
        if longest is None:
            return False
        new.connections.discard(longest)
        longest.transport.abort()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Refuses what the parser would keep without bound: endless headers, trailers and pipelines.

    Attributes: active_time: when it last sent something or got an answer, by time.monotonic()
    """

    _num_unbound = 0  # bytes since the latest ones of a body, or since the request began

    def __init__(self, room: Connections, **how: Any):
        super().__init__(**how)
        self.active_time = time.monotonic()
        self._room = room
        self._at_work: Any = None  # uvicorn's `cycle` is the latest request, which may wait for this one

    @property
    def is_idle(self) -> bool:
        """Whether it has sent no whole request, or has its answer."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register a new client."""
        super().connection_made(transport)
        if not self._room.make_room(self):
            message = f"all {self._room.most} connections are in use; try again later"
            self._refuse(Refusal(503, message, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request at work, too, if others wait after it."""
        for cycle in (self._at_work, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._at_work = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._num_unbound = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is complete. If it asks for another protocol the request is read again, see `_feed`."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()
        if self.pipeline:
            # uvicorn pauses reading here, and would not notice that the client leaves. Pipelines are bounded.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take content; the service bounds its length."""
        self._num_unbound = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Its answer is sent."""
        self.active_time = time.monotonic()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Take new bytes."""
        if self.transport.is_closing():
            return
        self.active_time = time.monotonic()
        self._num_unbound += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP/1.1")
            return
        if self._num_unbound > _MAX_HEAD_BYTES or len(self.pipeline) > _MAX_PIPELINED:
            self.send_400_response("the head of a request is too long, or too many requests wait")

    def _feed(self, data: bytes) -> None:
        """Parse. A wish for another protocol is ignored, as a server may (RFC 9110, 7.8).

        httptools would leave the body of such a request to the other protocol, and then take it for the next request.
        So another parser reads the request again, without the wish. Raises: HttpParserError
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("this server is not a proxy") from None
                fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                data = head + data[upgrade.args[0] :]

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not a request, and close the connection."""
        if not self.transport.is_closing():
            self._refuse(Refusal(400, msg))

    def _refuse(self, refusal: Refusal) -> None:
        content = to_json(refusal.as_json())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[refusal.status] + head + content)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an application on a socket until `handle_exit`, then finishes what is under way for `grace_seconds`.

    A second `handle_exit` ends it at once. What is left then, or at the end of the grace, is cancelled.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_seconds: float,
        max_connections: int,
        on_ready: Callable[[], None],
        log: Callable[[str], None],
    ):
        """`on_ready` is called once the server listens; `log` gets lines about connections."""
        protocol = partial(BoundedProtocol, Connections(max_connections, log))
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL + 1,  # the gate logs
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=int(HEADER_SECONDS),
            timeout_graceful_shutdown=grace_seconds,  # type: ignore[arg-type]  # passed on to asyncio
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._idle_since: dict[tuple[Any, Any], float] = {}  # by connection and its latest request
        self._closing_since: dict[Any, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_QUEUED_BY_SYSTEM)  # asyncio takes one number for both
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the receiver of signals calls `handle_exit`."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal: the first ends the service, the second ends everything."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def end_within(self, seconds: float) -> None:
        """End the service; what has failed by now has this long to inform its client."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]  # as above
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as the class says. What is cancelled has a moment to inform its client, and to log."""
        ending = asyncio.ensure_future(super().shutdown(sockets))
        await asyncio.sleep(0)  # from here on it takes no more clients
        # uvicorn looks at `force_exit` too, but from Python 3.12 on keeps waiting for connections to close.
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
        # After each answer a connection waits again: that is another `cycle`.
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


_LAST_ANSWER_SECONDS = 2.0  # to inform clients that the engine is lost
_ENGINE_SECONDS = 8.0  # for the engine to end: it has a step to finish
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that end the server
_SPARE_CONNECTIONS = 256  # besides those of texts: other paths, and clients that keep theirs open
_SWITCH_SECONDS = 0.0005  # Python's 5 ms are long when each of many sockets waits for a thread that computes
_OWN_FILES = 112  # the link, pipes of child processes, modules that are imported late


@dataclass(frozen=True)
class ServerOptions:
    """What the server allows. Without `api_key` only requests to one of `hosts` come in; empty allows any host."""

    max_waiting: int
    limits: ClientLimits
    grace_seconds: float
    api_key: str | None = None
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    logs_contents: bool = False


@dataclass(frozen=True)
class FrontWork:
    """What the front gets at its start. `open_model` has reported to the user before, in the engine's process."""

    open_model: Callable[[], ServedModel]
    options: ServerOptions


def main(link: int, listening: int, signals: int) -> None:
    """Serve; the numbers are those of open files: the link, a bound socket, and one that passes signals on."""
    engine = os.getppid()
    sys.setswitchinterval(_SWITCH_SECONDS)
    connection = Connection(link)
    with socket.socket(fileno=listening) as listener, contextlib.suppress(EOFError):
        work: FrontWork = connection.recv()
        with contextlib.redirect_stderr(io.StringIO()):
            model = work.open_model()
        _, begin_state = connection.recv()  # EOFError: the engine cannot begin; its process reports why
        gc.collect()
        gc.freeze()  # modules stay: to scan them at each collection would stop all clients for a third of a second
        is_lost = asyncio.run(_serve(connection, begin_state, listener, signals, model, work.options))
        if is_lost:
            sys.exit("error: the process that generates has ended; start the server again")
        if not _has_ended(connection):
            os.kill(engine, signal.SIGKILL)


async def _serve(
    connection: Connection,
    begin_state: EngineState,
    listener: socket.socket,
    signals: int,
    model: ServedModel,
    options: ServerOptions,
) -> bool:
    """Serve; say whether the engine was lost."""
    engine = FrontEnd(connection, begin_state, on_lost=lambda: server.end_within(_LAST_ANSWER_SECONDS))
    desk = Desk(engine, max_waiting=options.max_waiting)
    service = Service(model, desk, options.limits, engine.log_contents if options.logs_contents else None)
    service.body_reader.start()
    app = build_app(
        service, api_key=options.api_key, hosts=options.hosts, origins=list(options.origins), log=engine.log
    )
    wanted = options.max_waiting + begin_state.usage.num_rows + _SPARE_CONNECTIONS
    server = HttpServer(
        app,
        grace_seconds=options.grace_seconds,
        max_connections=_allowed_connections(wanted),
        on_ready=engine.say_ready,
        log=engine.log,
    )
    loop = asyncio.get_running_loop()

    def read_signals() -> None:
        numbers = os.read(signals, 64)
        if not numbers:
            loop.remove_reader(signals)
        for number in numbers:
            if number in SIGNALS:
                server.handle_exit(number, None)

    loop.add_reader(signals, read_signals)
    try:
        await server.serve([listener])
    finally:
        loop.remove_reader(signals)
        service.close()
        engine.close()
    return engine.is_lost


def _has_ended(connection: Connection) -> bool:
    """Whether the engine closes its end of the link in time. What it still sends is dropped."""
    end = time.monotonic() + _ENGINE_SECONDS
    try:
        while connection.poll(max(0.0, end - time.monotonic())):
            connection.recv()
    except (EOFError, OSError):
        return True
    return False


def _allowed_connections(wanted: int) -> int:
    """The number of connections, `wanted` at most, that the system allows once this process has raised its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = ACCEPTED_AT_ONCE + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        soft = wanted + others if hard == resource.RLIM_INFINITY else min(wanted + others, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(wanted, soft - others))
    return wanted
