"""Clients that leave, stall, or send nonsense: a 4xx or a closed connection, and no effect on others."""

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from raw_client import get, metric, open_socket, post, read_answer, request_bytes
from server import ServerProcess, running_server

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
STORY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 20}
HELD = ("response_format", "schema", "json_output", "regex", "choice", "grammar")
LONG = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--max-body", 1) as server:
        yield server


@pytest.fixture
def unharmed(server: ServerProcess) -> Iterator[None]:
    """The server tells the same text before a test and after it, and has all its pages then."""
    _, before = post(server.port, COMPLETE, STORY)
    yield
    wait_until_free(server.port)
    _, after = post(server.port, COMPLETE, STORY)
    assert after["choices"] == before["choices"]


def wait_until_free(port: int, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while metric(port, "texts") or metric(port, "pages_free") != metric(port, "pages"):
        assert time.monotonic() < end, get(port, "/metrics")[1]
        time.sleep(0.05)


@pytest.mark.usefixtures("unharmed")
def test_who_leaves_gives_rows_back(server: ServerProcess, pytestconfig: pytest.Config) -> None:
    rng = random.Random(1)
    for index in range(pytestconfig.getoption("--serve-leavers")):
        body = {**LONG, "seed": index, "n": rng.randint(1, 6), "stream": bool(index % 2)}
        connection = open_socket(server.port)
        content = request_bytes(COMPLETE, json.dumps(body).encode())
        connection.sendall(content[: rng.randint(1, len(content))] if index % 3 == 0 else content)
        if index % 2 and index % 3:
            assert connection.recv(rng.randint(1, 2000))
        time.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:  # a reset in place of a polite end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until_free(server.port)
    server.wait_for_line(r"/v1/completions 499 ")


def nasty_bodies(count: int) -> list[bytes]:
    """Bodies similar to right ones, and quite different ones."""
    rng = random.Random(2)
    right: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n": 1, "stop": ["x"]},
        {"prompt": "Hi", "max_tokens": 2, "logit_bias": {"5": 1}, "temperature": 0.5, "seed": 3, "logprobs": 1},
    ]
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1e308,
        10**30,
        2**64,
        "",
        "x" * 3000,
        [],
        {},
        [[]],
        [None],
        {"": 0},
        "\u0000",
    ]
    bodies = [b"", b"\x00", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 100_000, b"1" * 5000]
    bodies += [b'{"prompt":"\\ud800"}', b'{"prompt":NaN}', b'{"prompt":"Hi","temperature":Infinity}']
    while len(bodies) < count:
        body = dict(rng.choice(right))
        for _ in range(rng.randint(1, 2)):
            body[rng.choice([*body, "role", "tools", "model", "stream_options", "top_k", *HELD])] = rng.choice(values)
        text = bytearray(json.dumps(body).encode())
        if rng.random() < 0.5:
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        bodies.append(bytes(text))
    return bodies


@pytest.mark.usefixtures("unharmed")
def test_malformed_bodies_are_refused(server: ServerProcess, pytestconfig: pytest.Config) -> None:
    """Some are right by chance; none is a bug of the server."""
    statuses = set()
    for body in nasty_bodies(pytestconfig.getoption("--serve-bodies")):
        for path in (CHAT, COMPLETE):
            status, answer = post(server.port, path, body)
            statuses.add(status)
            if status != 200:
                assert 400 <= status < 500, (body, answer)
                assert answer["error"]["message"]
    assert {200, 400} <= statuses


@pytest.mark.usefixtures("unharmed")
def test_other_contents_are_refused(server: ServerProcess) -> None:
    for path in ("/tokenize", "/detokenize", CHAT, COMPLETE):
        assert post(server.port, path, STORY, kind="text/plain")[0] == 415
        with open_socket(server.port) as connection:  # refused by its length: nobody waits for the body
            connection.sendall(request_bytes(path, b" " * 2_000_000)[:500])
            assert read_answer(connection)[0] == 413
        assert post(server.port, path, b"[" + b"1," * 100 + b"1]")[0] == 400


@pytest.mark.usefixtures("unharmed")
def test_a_text_that_cannot_fit_is_not_encoded(server: ServerProcess) -> None:
    text = "Once upon a time " * 50_000
    messages = [{"role": "user", "content": text}]
    for path, body in (
        (COMPLETE, {"prompt": text}),
        (CHAT, {"messages": messages}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
    ):
        status, answer = post(server.port, path, body)
        assert status == 400
        assert re.match(r"the prompt has at least \d+ tokens; the context limit is 1024;", answer["error"]["message"])
        assert answer["error"]["param"] == next(iter(body))


@pytest.mark.usefixtures("unharmed")
def test_a_body_without_end_is_refused_at_its_limit(server: ServerProcess) -> None:
    with open_socket(server.port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            for _ in range(1000):
                connection.sendall(chunk)
        except OSError:
            return  # the connection is closed
        raise AssertionError("the server took 64 MiB")


NOT_HTTP = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
]


@pytest.mark.usefixtures("unharmed")
def test_what_is_not_http_is_refused(server: ServerProcess) -> None:
    for head in NOT_HTTP:
        with open_socket(server.port) as connection, suppress(OSError):  # closed while we still sent
            connection.sendall(head)
            assert 400 <= read_answer(connection)[0] < 500, head[:60]


@pytest.mark.usefixtures("unharmed")
def test_a_reader_that_does_not_read_holds_no_row(server: ServerProcess) -> None:
    """Its text is generated to the end, and waits in memory."""
    with open_socket(server.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {**LONG, "n": 4, "max_tokens": 50}
        connection.sendall(request_bytes(COMPLETE, json.dumps(body).encode()))
        wait_until_free(server.port, seconds=60)
        status, answer = read_answer(connection)
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n")
    _, whole = post(server.port, COMPLETE, {**body, "stream": False})
    texts = ["", "", "", ""]
    for line in answer.split(b"\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_a_line_of_the_log_cannot_be_forged(server: ServerProcess) -> None:
    get(server.port, "/nope%0a12:00:00%20GET%20/forged%20200")
    server.wait_for_line(r"GET /nope%0a12:00:00%20GET%20/forged%20200 404")
    assert not any(line.startswith("12:00:00 GET /forged") for line in server.lines)
