"""A process that dies: every running request gets an error, the other process ends, and nothing remains."""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from raw_client import open_socket, post, read_answer, request_bytes
from server import ServerProcess, running_server

COMPLETE = "/v1/completions"
LONG = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 900, "ignore_eos": True}
SECONDS = 20
LOST = "the process that generates has ended; the server cannot continue; restart it"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are waited for as Linux lets a process do it")


@pytest.fixture(autouse=True)
def _orphans_are_ours() -> Iterator[None]:
    """A process whose parent has died becomes a child of this one, so that its exit code can be read."""
    set_child_subreaper = 36
    libc = ctypes.CDLL(None)
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(set_child_subreaper, 0, 0, 0, 0) == 0


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server() as server:
        assert post(server.port, COMPLETE, {"prompt": "It was", "regex": "[a-z]{3}"})[0] == 200
        yield server


def processes_of(server: ServerProcess) -> tuple[psutil.Process, list[psutil.Process]]:
    """The front, and what it has started: a process that reads schemas."""
    (front,) = psutil.Process(server.process.pid).children()
    started = front.children(recursive=True)
    assert started
    return front, started


def begin(server: ServerProcess, *, is_stream: bool) -> socket.socket:
    connection = open_socket(server.port, seconds=SECONDS)
    connection.sendall(request_bytes(COMPLETE, json.dumps({**LONG, "stream": is_stream}).encode()))
    return connection


def assert_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, SECONDS)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []


def test_clients_are_told_that_the_engine_is_lost(server: ServerProcess) -> None:
    front, started = processes_of(server)
    whole, stream = begin(server, is_stream=False), begin(server, is_stream=True)
    assert stream.recv(10, socket.MSG_PEEK | socket.MSG_WAITALL)  # the answer has begun
    os.kill(server.process.pid, signal.SIGKILL)
    status, answer = read_answer(whole)
    assert (status, json.loads(answer)["error"]["message"]) == (500, LOST)
    status, answer = read_answer(stream)
    *_, last, rest = answer.split(b"\n\n")
    assert (status, rest) == (200, b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == LOST
    assert server.process.wait(SECONDS) == -signal.SIGKILL  # from now on the front is a child of ours
    _, code = os.waitpid(front.pid, 0)
    assert os.waitstatus_to_exitcode(code) == 1
    server.wait_for_line("error: the process that generates has ended; start the server again")
    assert_gone(started)


def test_the_engine_ends_without_its_front(server: ServerProcess) -> None:
    front, started = processes_of(server)
    stream = begin(server, is_stream=True)
    assert stream.recv(1)
    front.kill()
    assert server.end(0) == 1
    assert server.lines[-1] == "error: the process that serves connections has ended; start the server again\n"
    assert_gone(started)
    with pytest.raises(OSError, match="refused"):
        open_socket(server.port)


def test_an_end_leaves_nothing_behind(server: ServerProcess) -> None:
    front, started = processes_of(server)
    assert server.end(signal.SIGINT) == 130
    assert_gone([front, *started])


def test_two_signals_end_what_hangs(server: ServerProcess) -> None:
    """A front that does not answer, with requests in progress: after some seconds nothing of it is left."""
    front, started = processes_of(server)
    stream = begin(server, is_stream=True)
    assert stream.recv(1)
    front.suspend()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.end(signal.SIGTERM) == 0
    assert_gone([front, *started])


def test_signals_end_an_engine_that_hangs() -> None:
    """Its thread is in a call that does not end, and takes the interpreter's lock with it."""
    program = (
        "import ctypes, llmcli.engine.scheduler as scheduler\n"
        "scheduler.Scheduler.step = lambda self: ctypes.PyDLL(None).sleep(600)\n"
        "from llmcli.__main__ import main\n"
        "import sys; sys.argv[0] = 'llmcli'; main()\n"
    )
    with running_server(program=program) as hanging:
        connection = begin(hanging, is_stream=False)
        time.sleep(1)
        for _ in range(2):
            hanging.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        hanging.process.wait(SECONDS)
        connection.close()
