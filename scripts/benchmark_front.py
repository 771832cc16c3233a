"""The processor time that the front of a server takes for a piece of a stream, without a model.

    python -m scripts.benchmark_front [--clients N] [--steps N] [--rounds N]

The engine's end tells each client's text a token in a step, and takes the next step once every client has that one's
piece: so no pieces are joined, and front and clients never run at the same time.
"""

import argparse
import json
import select
import signal
import socket
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Any

from llmcli.cli.run import check_run
from llmcli.cli.serve import ServeOptions, open_served_model
from llmcli.cli.shared import RunOptions, SamplerOptions
from llmcli.engine.request import Event, Finished, Request, Timings, Token
from llmcli.engine.texts import Usage
from llmcli.serve.front import FrontWork, ServerOptions
from llmcli.serve.server import Server
from llmcli.serve.service import ClientLimits
from scripts.benchmark_serve import processor_seconds_of_front

BODY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 500, "stream": True}
WORD, TOKEN_ID = " there", 100


class Clients:
    """Connections that stream, each one text."""

    def __init__(self, port: int, count: int):
        content = json.dumps(BODY).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        self._sockets = {}
        self._poll = select.epoll()
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            self._sockets[one.fileno()] = one
            self._poll.register(one, select.EPOLLIN)

    def wait_for_pieces(self) -> None:
        """Wait until each has one piece."""
        missing = set(self._sockets)
        while missing:
            for number, _ in self._poll.poll():
                said = self._sockets[number].recv(65536)
                assert said, "the server hung up"
                if said.endswith(b"\n\n\r\n") or said.endswith(b"0\r\n\r\n"):
                    missing.discard(number)

    def close(self) -> None:
        """Close all."""
        for one in self._sockets.values():
            one.close()
        self._poll.close()


class Steps:
    """A scheduler that gives a token of every text in each of a number of steps, and measures them."""

    runner: Any = SimpleNamespace(limits=SimpleNamespace(num_pages=0), free_pages=0)
    num_waiting = 0
    is_idle = False

    def __init__(self, port: int, num_clients: int, num_steps: int):
        self.usage = Usage(num_clients)
        self.piece_seconds: list[float] = []  # of each step
        self._port, self._num_clients, self._num_steps = port, num_clients, num_steps
        self._clients: Clients | None = None
        self._num_begun = self._step = 0
        self._seconds = 0.0

    def submit(self, request: Request) -> int:
        """Take a request."""
        self._num_begun += 1
        return self._num_begun

    def cancel(self, request: int) -> None:
        """Nothing to cancel: all texts end by themselves."""

    def interrupt(self) -> list[Event]:
        """Do nothing."""
        return []

    def step(self) -> list[Event]:
        """A token of every text, once all have the previous one."""
        if self._clients is None:
            self._clients = Clients(self._port, self._num_clients)
        if self._num_begun < self._num_clients:
            return []
        if self._step:
            self._clients.wait_for_pieces()
        seconds = processor_seconds_of_front()
        if self._step:
            self.piece_seconds.append((seconds - self._seconds) / self._num_clients)
        self._seconds = seconds
        self._step += 1
        texts = range(1, self._num_clients + 1)
        if self._step <= self._num_steps:
            return [Token(0, TOKEN_ID, WORD, request=number) for number in texts]
        self._clients.close()
        signal.raise_signal(signal.SIGTERM)
        timings = Timings(0, 0.0, 0.0, 0, 0.0)
        return [Finished(0, "", "", (), "length", timings, number) for number in texts]


def measure(num_clients: int, num_steps: int) -> list[float]:
    """Processor seconds of a piece in each step."""
    request = check_run(RunOptions(context=512), {}, SamplerOptions(), None)
    open_model = partial(open_served_model, request, None, None, None, None)
    listener, _ = ServeOptions(port=0).listen(has_key=False)
    steps = Steps(listener.getsockname()[1], num_clients, num_steps)
    options = ServerOptions(max_waiting=num_clients, limits=ClientLimits(2**20, None), grace_seconds=1.0)
    with Server(listener, FrontWork(open_model, options)) as server:
        server.run(
            steps,
            lambda asked, grammar: asked,
            log=lambda line: None,
            log_contents=lambda what, contents: None,
            on_ready=lambda: None,
        )
    return steps.piece_seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.rounds):
        parts = sorted(1e6 * seconds for seconds in measure(options.clients, options.steps))
        print(f"processor time of a piece: median of steps {statistics.median(parts):.1f} us", end=", ")
        print(f"a tenth have less than {parts[len(parts) // 10]:.1f}", flush=True)


if __name__ == "__main__":
    main()
