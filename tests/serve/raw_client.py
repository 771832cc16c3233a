"""Requests over bare sockets, as only hostile clients send them."""

import json
import socket
from typing import Any


def request_bytes(path: str, body: bytes, *, kind: str = "application/json", more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode("latin-1") + body


def open_socket(port: int, seconds: float = 120) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of one answer, read to its end by its length or by chunks."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if b"content-length" in headers:
        return status, file.read(int(headers[b"content-length"]))
    if headers.get(b"transfer-encoding") == b"chunked":
        body = b""
        while size := int(file.readline(), 16):
            body += file.read(size)
            file.readline()
        return status, body
    return status, file.read()


def post(port: int, path: str, body: Any, **how: Any) -> tuple[int, Any]:
    """The status and the JSON of one answer; a `body` that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with open_socket(port) as connection:
        connection.sendall(request_bytes(path, content, **how))
        status, answer = read_answer(connection)
    return status, json.loads(answer) if answer.startswith((b"{", b"[")) else answer


def get(port: int, path: str, *, host: str = "localhost", more: str = "") -> tuple[int, str]:
    with open_socket(port) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
        status, answer = read_answer(connection)
    return status, answer.decode()


def metric(port: int, name: str) -> float:
    """One number of /metrics."""
    lines = get(port, "/metrics")[1].splitlines()
    (value,) = (line.split()[1] for line in lines if line.split()[0] == f"llmcli_{name}")
    return float(value)
