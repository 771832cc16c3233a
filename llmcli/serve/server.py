"""`run_server`: one server from its first connection to its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

from llmcli.serve.app import build_app
from llmcli.serve.desk import Desk
from llmcli.serve.http import HttpServer
from llmcli.serve.model import ServedModel
from llmcli.serve.service import Limits, Service
from llmcli.serve.worker import Scheduler

_SPARE_CONNECTIONS = 256  # beside those of texts: other paths, and clients that keep theirs open
_STEP_SECONDS = 5.0  # for the step that runs to end


@dataclass(frozen=True)
class ServerOptions:
    """What the server allows. Without `api_key` only requests to one of `hosts` come in; empty is any host."""

    max_waiting: int
    limits: Limits
    grace_seconds: float
    api_key: str | None = None
    hosts: Collection[str] = ()
    origins: Collection[str] = ()


def run_server(
    listener: socket.socket,
    scheduler: Scheduler,
    model: ServedModel,
    options: ServerOptions,
    *,
    log: Callable[[str], None],
    log_contents: Callable[[str, object], None] | None,
    on_ready: Callable[[], None],
) -> list[int]:
    """Serve on a bound socket until a signal ends it; return the signals that came."""

    async def serve() -> list[int]:
        desk = Desk(scheduler, max_waiting=options.max_waiting)
        service = Service(model, desk, options.limits, log_contents)
        app = build_app(service, api_key=options.api_key, hosts=options.hosts, origins=list(options.origins), log=log)
        most = options.max_waiting + scheduler.usage.num_rows + _SPARE_CONNECTIONS
        server = HttpServer(app, grace_seconds=options.grace_seconds, max_connections=most, on_ready=on_ready)
        desk.worker.start()
        try:
            await server.serve([listener])
        finally:
            service.encoder.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(desk.worker.stop, _STEP_SECONDS)
        return server.signals

    return asyncio.run(serve())
