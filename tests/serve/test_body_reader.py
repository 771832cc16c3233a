"""Long bodies are read in a process of their own, which may die, and which ends with the server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from raw_client import post
from server import ROOT, running_server

from llmcli.serve.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from llmcli.serve.body_reader import BodyReader
from llmcli.serve.refusal import Refusal

MESSAGES = [{"role": "developer", "content": "Be kind"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "string", "maxLength": 3}}}


@pytest.fixture(scope="module")
def reader() -> Iterator[BodyReader]:
    reader = BodyReader()
    yield reader
    reader.close()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ChatBody, {"messages": MESSAGES, "n": 2, "temperature": 0.5, "response_format": FORMAT, "seed": 2**64 - 1}),
        (
            CompletionBody,
            {"prompt": ["x" * 100_000, "\U0001f600"], "stop": ["a"], "logit_bias": {"3": 1}},
        ),
        (CompletionBody, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "stream_options": None}),
        (TokenizeBody, {"messages": MESSAGES}),
        (DetokenizeBody, {"tokens": list(range(100_000))}),
    ],
)
def test_a_body_is_the_one_that_is_read_here(reader: BodyReader, kind: type[Body], value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    assert reader.read(kind, content) == parse_body(kind, content)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"prompt":1}', b'{"prompt":"a","x":1}', b"[" * 200_000])
def test_a_refusal_is_the_one_that_is_given_here(reader: BodyReader, content: bytes) -> None:
    with pytest.raises(Refusal) as here:
        parse_body(CompletionBody, content)
    with pytest.raises(Refusal) as there:
        reader.read(CompletionBody, content)
    assert (there.value.status, there.value.as_json()) == (here.value.status, here.value.as_json())


def test_after_its_death_another_one_reads() -> None:
    content = b'{"tokens":[1]}'
    before = set(psutil.Process().children())  # other tests may have started processes that live on
    reader = BodyReader()
    reader.start()
    (child,) = set(psutil.Process().children()) - before
    child.send_signal(signal.SIGKILL)
    with pytest.raises(Refusal, match="could not be read"):
        reader.read(DetokenizeBody, content)
    assert reader.read(DetokenizeBody, content) == DetokenizeBody(tokens=[1])
    reader.close()


def test_it_ends_with_who_has_started_it() -> None:
    program = "import time; from llmcli.serve.body_reader import BodyReader; BodyReader().start(); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 30
    while not (children := psutil.Process(parent.pid).children()):
        assert time.monotonic() < end
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, 30)
    assert not alive


def test_the_server_reads_long_bodies_with_it() -> None:
    with running_server() as server:
        front = psutil.Process(server.process.pid).children()[0]
        assert len(front.children()) == 1
        body = {"prompt": "Hi", "max_tokens": 1, "user": "x" * 100_000}
        assert post(server.port, "/v1/completions", body)[0] == 200
        front.children()[0].kill()
        assert post(server.port, "/v1/completions", body)[0] == 500
        assert post(server.port, "/v1/completions", body)[0] == 200
        assert server.end() == 0
        assert not psutil.pid_exists(front.pid) or front.status() == psutil.STATUS_ZOMBIE
