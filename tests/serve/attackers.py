"""Clients that mean harm, in a process of their own: `python attackers.py PORT SECONDS SEED`. They end by themselves.

They talk to 127.0.0.1 alone. Each attacker does one thing over and over: see the functions.
"""

import asyncio
import json
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
LARGE = [  # bodies of up to 8 MB: valid ones, and those that are slow to refuse
    (COMPLETE, lambda: json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "stop": ["x" * 130_000] * 62}).encode()),
    (CHAT, lambda: b'{"messages":[' + b"{}," * 900_000 + b"{}]}"),
    (CHAT, lambda: b'{"messages":[' + b"{}," * 2_700_000 + b"{}]}"),
    (COMPLETE, lambda: b'{"prompt":[1,' + b"null," * 900_000 + b"1]}"),
    (COMPLETE, lambda: json.dumps({"prompt": ["a"] * 200_000, "max_tokens": 1}).encode()),
    (COMPLETE, lambda: b"{" + b",".join(b'"k%d":1' % key for key in range(500_000)) + b"}"),
    (COMPLETE, lambda: json.dumps({"prompt": "\U0001f600" * 1_900_000, "max_tokens": 1}, ensure_ascii=False).encode()),
    ("/tokenize", lambda: json.dumps({"prompt": "\U0001f600" * 500_000}, ensure_ascii=False).encode()),
    ("/detokenize", lambda: json.dumps({"tokens": [1] * 900_000}).encode()),
    (COMPLETE, lambda: b"[" * 8_000_000),
]


def head(path: str, length: int, more: str = "") -> bytes:
    lines = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n"
    return f"POST {path} HTTP/1.1\r\n{lines}".encode()


async def ask(port: int, path: str, body: bytes, seconds: float = 60) -> None:
    """Send one request, and read the answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            writer.write(head(path, len(body), "Connection: close\r\n") + body)
            await writer.drain()
            while await reader.read(2**20):
                pass
    finally:
        writer.close()


async def stream_much(port: int, rng: random.Random) -> None:
    """128 long texts with all facts about each token, read slowly, and left at some point."""
    body = json.dumps({**LONG, "n": 128, "logprobs": 20, "stream": True, "seed": rng.randrange(1000)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(COMPLETE, len(body)) + body)
    end = time.monotonic() + rng.uniform(2, 20)
    with suppress(TimeoutError):
        while time.monotonic() < end and await asyncio.wait_for(reader.read(2**16), 5):
            await asyncio.sleep(0.01)
    writer.transport.abort()


async def ask_metrics(port: int, rng: random.Random) -> None:
    """The engine's counters, in a loop."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    await asyncio.wait_for(reader.read(), 30)
    writer.close()


async def send_large(port: int, rng: random.Random) -> None:
    """One of the expensive bodies; some clients leave before the answer."""
    path, make = rng.choice(LARGE)
    await ask(port, path, make(), rng.choice([0.1, 1, 60]))


async def send_malformed(port: int, rng: random.Random) -> None:
    """Heads and bodies with bytes at random, requests for other protocols, half requests."""
    body = bytearray(json.dumps({**LONG, "max_tokens": 2}).encode())
    for _ in range(rng.randrange(4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    more = rng.choice(["", "Upgrade: h2c\r\nConnection: Upgrade\r\n", "Expect: 100-continue\r\n", "Host: evil\r\n"])
    content = bytearray(head(COMPLETE, len(body) + rng.choice([0, 0, 0, -3, 9]), more) + body)
    if rng.random() < 0.3:
        content[rng.randrange(len(content))] = rng.randrange(256)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1000), rng.uniform(0.01, 2))
    writer.transport.abort() if rng.random() < 0.5 else writer.close()


async def stay_idle(port: int, rng: random.Random) -> None:
    """Connections that send nothing, half a head or half a body, kept open."""
    kept = []
    for _ in range(100):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        begin = [b"", b"POST /v1/completions HTTP/1.1\r\nHost: local", head(COMPLETE, 1000) + b'{"prompt":']
        connection.sendall(rng.choice(begin))
        kept.append(connection)
        await asyncio.sleep(0)
    await asyncio.sleep(rng.uniform(1, 10))
    for connection in kept:
        connection.close()


ATTACKERS: list[tuple[Callable[[int, random.Random], Awaitable[None]], int]] = [
    (stream_much, 2),
    (ask_metrics, 4),
    (send_large, 4),
    (send_malformed, 4),
    (stay_idle, 8),
]


async def attack(port: int, seconds: float, seed: int) -> None:
    """All attackers at once, for a time."""
    end = time.monotonic() + seconds

    async def repeat(act: Callable[[int, random.Random], Awaitable[None]], rng: random.Random) -> None:
        while time.monotonic() < end:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await act(port, rng)
            await asyncio.sleep(0.01)

    acts = [act for act, count in ATTACKERS for _ in range(count)]
    tasks = [asyncio.create_task(repeat(act, random.Random(f"{seed} {index}"))) for index, act in enumerate(acts)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(attack(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
