"""Stalled connections: one that sends or reads nothing is closed in time, and others are served meanwhile."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from loop import in_loop
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.serve import front, service
from llmcli.serve.app import Gate
from llmcli.serve.bodies import CompletionBody
from llmcli.serve.front import HttpServer
from llmcli.serve.service import ClientLimits, Metrics, Service

SECONDS = 30
LONG_ANSWER = 32 * 2**20  # more than the system takes for a reader that does not read
ASK = b"POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a body, or answers at length."""
    if scope["path"] == "/ask":
        await Service(None, None, ClientLimits(1000, None)).read(CompletionBody, Request(scope, receive))  # type: ignore[arg-type]
    if scope["path"] == "/parts":
        parts = ("x" * 2**20 for _ in range(LONG_ANSWER >> 20))
        await StreamingResponse(parts)(scope, receive, send)
        return
    size = LONG_ANSWER if scope["path"] == "/long" else 2
    await PlainTextResponse("x" * size)(scope, receive, send)


@asynccontextmanager
async def serving(
    lines: list[str] | None = None, app: ASGIApp = app, most: int = 100
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server for `most` connections, and its port; `lines` gets its log."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_ready = asyncio.Event()
    log = ([] if lines is None else lines).append
    gate = Gate(app, None, (), Metrics(), (), log)
    server = HttpServer(gate, grace_seconds=0.1, max_connections=most, on_ready=is_ready.set, log=log)
    task = asyncio.create_task(server.serve([listener]))
    await is_ready.wait()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.end_within(0.1)
        await task


async def until_closed(reader: asyncio.StreamReader, writer: Any, part: bytes) -> bytes:
    """Send a part again and again until the other side hangs up; return its answer."""
    said = b""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                writer.write(part)
                more = await asyncio.wait_for(reader.read(65536), 0.1)
            except TimeoutError:
                continue
            except ConnectionError:
                return said
            if not more:
                return said
            said += more


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(front, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(service, "BODY_SECONDS", 1.0)


@pytest.mark.parametrize(
    "begin", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
@in_loop
async def test_a_header_that_does_not_end_is_not_waited_for(begin: bytes) -> None:
    """The request comes byte by byte; the third connection has had an answer, and begins another request."""
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        if begin.endswith(b"\r\n\r\n"):
            assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200 ")
        said = await until_closed(reader, writer, b"X")
        assert b" 200 " not in said
        writer.close()


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 4096),
        (b"GET /", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X: a\r\n" * 512),
        (ASK.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\n", b"X: a\r\n" * 512),
        (ASK.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: ", b"a" * 4096),
        (b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100),
    ],
    ids=["header", "path", "headers", "trailers", "trailer", "requests"],
)
@in_loop
async def test_what_has_no_end_is_refused_before_its_time_is_over(
    begin: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that the parser would keep: parts of a request outside the body, and requests that wait for an answer."""
    monkeypatch.setattr(front, "HEADER_SECONDS", 600.0)
    monkeypatch.setattr(service, "BODY_SECONDS", 600.0)
    async with serving() as (server, port):
        client = socket.create_connection(("127.0.0.1", port))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        num_sent = 0

        async def send() -> None:
            nonlocal num_sent
            await loop.sock_sendall(client, begin)
            while num_sent < 32 * 2**20:
                await loop.sock_sendall(client, part)
                num_sent += len(part)
                await asyncio.sleep(0.001)

        sending = asyncio.create_task(send())
        async with asyncio.timeout(SECONDS):
            while not any(one.transport.is_closing() for one in server.server_state.connections):
                await asyncio.sleep(0.01)
                if sending.done():
                    break
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert num_sent < 2**20
        client.close()


@in_loop
async def test_a_body_that_comes_too_slowly_is_refused() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK)
        said = await until_closed(reader, writer, b" ")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 1 s" in said
        writer.close()


@in_loop
async def test_a_closed_connection_that_is_not_read_is_dropped() -> None:
    async with serving() as (server, port):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(SECONDS):
            while not server.server_state.connections:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            for one in server.server_state.connections:
                one.transport.close()
            while server.server_state.connections:
                await asyncio.sleep(0.05)
        client.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method, the path and the body."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{scope['method']} {scope['path']} {body.decode()};")(scope, receive, send)


WISHES = [
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    "Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n",
    "UPGRADE: anything/1.0, TLS/1.2\r\nCONNECTION: UPGRADE\r\n",
    "Upgrade: h2c\r\n",
    "Connection: upgrade\r\n",
]
SECRET = "GET /secret HTTP/1.1\r\nHost: localhost\r\n\r\n"  # a body that would be a request


@pytest.mark.parametrize(
    ("wish", "is_chunked", "at_once"),
    list(zip(WISHES, (True, False) * 2 + (True,), (1, 1, 7, 10_000, 10_000), strict=True)),
)
def test_a_wish_for_another_protocol_is_ignored(wish: str, is_chunked: bool, at_once: int) -> None:
    """The body stays a body, and later requests are unchanged, however the bytes come."""
    body = f"{len(SECRET):x}\r\n{SECRET}\r\n0\r\n\r\n" if is_chunked else SECRET
    size = "Transfer-Encoding: chunked\r\n" if is_chunked else f"Content-Length: {len(SECRET)}\r\n"
    one = f"POST /one HTTP/1.1\r\nHost: localhost\r\n{wish}{size}\r\n{body}"
    last = f"GET /last HTTP/1.1\r\nHost: localhost\r\n{wish}".replace("keep-alive", "close")
    content = (one + one + last + "Connection: close\r\n\r\n").encode()

    async def test() -> bytes:
        async with asyncio.timeout(SECONDS), serving(app=echo) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for begin in range(0, len(content), at_once):
                writer.write(content[begin : begin + at_once])
                await writer.drain()
                if at_once < 100:
                    await asyncio.sleep(0)
            said = await reader.read()
            writer.close()
            return said

    said = asyncio.run(test())
    assert said.count(f"POST /one {SECRET};".encode()) == 2
    assert said.count(b"GET /last ;") == 1
    assert said.count(b"HTTP/1.1 200") == 3


def test_this_is_no_proxy() -> None:
    async def test() -> bytes:
        async with asyncio.timeout(SECONDS), serving(app=echo) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n{SECRET}".encode())
            said = await reader.read()
            writer.close()
            return said

    said = asyncio.run(test())
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"secret" not in said
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@in_loop
async def test_a_new_client_takes_the_place_of_the_longest_idle_one() -> None:
    lines: list[str] = []
    async with asyncio.timeout(SECONDS), serving(lines, most=10) as (server, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        idle[0][1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # is not the longest idle one any more
        await idle[0][0].readuntil(b"xx")
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            assert len(server.server_state.connections) <= 10
        idle[0][1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await idle[0][0].read()).startswith(b"HTTP/1.1 200 ")
        for _, writer in idle:
            writer.close()
    assert sum("connections are in use" in line for line in lines) == 1


@in_loop
async def test_where_all_connections_are_at_work_a_new_one_is_told_so() -> None:
    lines: list[str] = []
    async with asyncio.timeout(SECONDS), serving(lines, most=3) as (_, port):
        at_work = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(3)]
        for reader, writer in at_work:
            writer.write(b"GET /parts HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(1)
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = await reader.read()
            assert said.startswith(b"HTTP/1.1 503 ")
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            writer.close()
        for _, writer in at_work:
            writer.close()
    assert sum("connections are in use" in line for line in lines) == 1


@pytest.mark.parametrize("more", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3], ids=["alone", "pipelined"])
@in_loop
async def test_who_leaves_is_noticed_whatever_it_has_asked_for(more: bytes) -> None:
    is_asked, has_left = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        is_asked.set()
        assert (await receive())["type"] == "http.disconnect"
        has_left.set()

    async with asyncio.timeout(SECONDS), serving(app=wait) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await is_asked.wait()
        writer.write(more)
        while more and not any(getattr(one, "pipeline", ()) for one in server.server_state.connections):
            await asyncio.sleep(0.01)
        writer.close()
        await has_left.wait()


async def gate_status(gate: Gate, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """The status of a request that the gate answers by itself."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": headers}
    await gate(scope, send, send)  # type: ignore[arg-type]
    return int(sent[0]["status"])


@in_loop
async def test_only_the_path_itself_opens_the_gate() -> None:
    """For any other request: with a key, closed paths stay closed."""
    gate = Gate(echo, "key", (), Metrics(), (), lambda _: None)
    for path in ("/v1/models", "//health", "/health/", "/health%2f..", "/HEALTH", "/health;x"):
        for host in (b"x/health?", b"x/health", b"localhost/health#", b"x\\health"):
            headers = [(b"host", host), (b"x-forwarded-host", b"localhost"), (b"x-original-url", b"/health")]
            assert await gate_status(gate, path, headers) == 401


@in_loop
async def test_two_hosts_are_none() -> None:
    gate = Gate(echo, None, ("localhost",), Metrics(), (), lambda _: None)
    assert await gate_status(gate, "/", [(b"host", b"localhost"), (b"host", b"evil.example")]) == 400


@in_loop
async def test_who_does_not_read_holds_up_no_end() -> None:
    """Two signals end the server at once, with a line for each answer in progress."""
    lines: list[str] = []
    async with asyncio.timeout(SECONDS), serving(lines) as (server, port):
        server.config.timeout_graceful_shutdown = 60
        clients = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(3)]
        for _, writer in clients:
            writer.write(b"GET /parts HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while sum(one.flow.write_paused for one in server.server_state.connections) < 3:
            await asyncio.sleep(0.01)
        start_time = time.monotonic()
        for _ in range(2):
            server.handle_exit(0, None)
        while server.server_state.tasks:
            await asyncio.sleep(0.01)
        assert time.monotonic() - start_time < 1
        for _, writer in clients:
            writer.close()
    assert len(lines) == 3
    assert all(line.startswith("GET /parts 200 ") for line in lines)
    assert all("s, the server was stopped before the answer was whole" in line for line in lines)


def test_a_bug_is_logged_by_its_class() -> None:
    """Its message may repeat what a user wrote."""

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("private words")

    async def send(message: Message) -> None:
        sent.append(message)

    lines: list[str] = []
    sent: list[Message] = []
    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "headers": []}
    asyncio.run(Gate(fail, None, (), Metrics(), (), lines.append)(scope, send, send))  # type: ignore[arg-type]
    (line,) = lines
    assert line.endswith("s, internal error, KeyError")
    assert b"KeyError: 'private words'" in sent[1]["body"]
