"""The front: the process that talks with clients. `server.py` starts it, next to the engine's process.

The engine's process gets the signals and passes them on by a socket, even while it hangs. When all is served the
engine has some seconds to end; then it is killed. The front also ends, with exit code 1, when the engine is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection

from llmcli.engine.remote.link import EngineState, FrontEnd
from llmcli.serve.app import build_app
from llmcli.serve.desk import Desk
from llmcli.serve.http import ACCEPTED_AT_ONCE, HttpServer
from llmcli.serve.service import ClientLimits, ServedModel, Service

_LAST_WORD_SECONDS = 2.0  # to inform clients that the engine is lost
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
    engine = FrontEnd(connection, begin_state, on_lost=lambda: server.end_within(_LAST_WORD_SECONDS))
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
