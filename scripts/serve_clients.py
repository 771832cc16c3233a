"""Clients of a measured server, in a process of their own: they stream, and note the times of what came.

    python -m scripts.serve_clients < WORK

The first line of stdin is JSON: `port`, `clients`, and `bodies`, which the clients send to /v1/completions, each the
next one when its answer has ended. A line "ready" goes out once all are connected; they begin at the second line of
stdin. Then JSON goes out, one object for each body: when it was sent, when its first piece and its end came
(CLOCK_MONOTONIC), and its pieces. They check little meanwhile, so as to take no time from the server.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

PATH = "/v1/completions"
END = b"\r\n0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection: sends a body, reads the stream to its end, goes on with the next body."""

    def __init__(self, bodies: Iterator[tuple[int, bytes]], done: dict[int, dict[str, Any]]):
        self._bodies, self._done = bodies, done
        self._answer = bytearray()
        self._index, self._times = 0, {"sent": 0.0, "first": 0.0}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send_next(self) -> None:
        """Send the next body; end if there is none."""
        following = next(self._bodies, None)
        if following is None:
            self.transport.close()
            self.ended.set_result(None)
            return
        self._index, body = following
        self._answer.clear()
        self._times = {"sent": time.monotonic(), "first": 0.0}
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        """Note the first piece and the end."""
        self._answer += data
        if not self._times["first"] and b"data: " in self._answer:
            self._times["first"] = time.monotonic()
        if self._answer.endswith(END):
            answer = bytes(self._answer)
            self._done[self._index] = {**self._times, "end": time.monotonic(), "answer": answer}
            self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        """A server that hangs up has failed."""
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"the server hung up: {bytes(self._answer[:500])!r}"))


def pieces_of(answer: bytes) -> list[dict[str, Any]]:
    """The pieces of a chunked stream of server-sent events."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ConnectionError(f"the server said {answer[:500]!r}")
    content = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    *pieces, last, _ = content.split(b"\n\n")
    if last != b"data: [DONE]":
        raise ConnectionError(f"a stream ends with {last[:500]!r}")
    return [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]


async def run(work: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all bodies; the results in their order."""
    encoded = iter([(index, json.dumps(body).encode()) for index, body in enumerate(work["bodies"])])
    done: dict[int, dict[str, Any]] = {}
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(work["clients"]):
        _, client = await loop.create_connection(lambda: Client(encoded, done), "127.0.0.1", work["port"])
        clients.append(client)
    print("ready", flush=True)
    sys.stdin.readline()
    for client in clients:
        client.send_next()
    await asyncio.gather(*(client.ended for client in clients))
    results = [done[index] for index in range(len(done))]
    for result in results:
        result["pieces"] = pieces_of(result.pop("answer"))
    return results


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))))
