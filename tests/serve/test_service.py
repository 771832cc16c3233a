"""Parts of the service: turns of clients, bodies, answers, metrics, the log and the link to the engine."""

import asyncio
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

import numpy as np
import psutil
import pytest
from loop import in_loop
from paged import ENDLESS, make_request, open_desk, open_scheduler
from raw_client import post
from server import ROOT, running_server
from starlette.types import Message, Receive, Scope, Send

from llmcli.engine.remote.link import EngineState, Sender
from llmcli.engine.request import Finished, Timings, Token
from llmcli.engine.texts import Usage
from llmcli.sampling.inspect import Inspection, TokenLogprob
from llmcli.serve.answers import Answer, ChatAnswer, CompletionAnswer
from llmcli.serve.app import Gate
from llmcli.serve.bodies import Body, BodyReader, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from llmcli.serve.refusal import Refusal
from llmcli.serve.server import LogWriter
from llmcli.serve.service import FairThread, Metrics, unless_gone
from llmcli.tokenizer.base import Tokenizer


@in_loop
async def test_clients_have_their_turns() -> None:
    """A large request delays another by one piece of work, not by all."""
    thread, may_begin = FairThread("test"), threading.Event()
    done: list[str] = []

    def work(name: str) -> Callable[[], None]:
        def begin() -> None:
            may_begin.wait(10)
            done.append(name)

        return begin

    asked = [asyncio.create_task(thread.run("a", work(f"a{index}"))) for index in range(5)]
    await asyncio.sleep(0)
    asked += [asyncio.create_task(thread.run(client, work(client + "0"))) for client in "bc"]
    asked.append(asyncio.create_task(thread.run("b", work("b1"))))
    await asyncio.sleep(0)
    asked[2].cancel()
    may_begin.set()
    await asyncio.gather(*asked, return_exceptions=True)
    assert done == ["a0", "a1", "b0", "c0", "a3", "b1", "a4"]
    thread.close()


@in_loop
async def test_a_fault_is_its_own_clients() -> None:
    thread = FairThread("test")
    fails, works = thread.run("a", lambda: 1 // 0), thread.run("b", lambda: 7)
    with pytest.raises(ZeroDivisionError):
        await fails
    assert await works == 7
    thread.close()


def test_a_refused_request_leaves_nothing_for_the_collector() -> None:
    """A body of 8 MB that waits for Python's collector takes its memory until then."""

    class Content:
        """The objects in the frames of a request."""

    contents: list[weakref.ref[Content]] = []
    thread = FairThread("test")

    def work(content: Content) -> None:
        raise Refusal(400, "no")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content = Content()
        contents.append(weakref.ref(content))
        await unless_gone(thread.run("client", partial(work, content)), receive)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def test() -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        gate = Gate(app, None, (), Metrics(), (), lambda line: None)
        for _ in range(3):
            await gate({"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "headers": []}, receive, send)
            await asyncio.sleep(0.01)
        assert [message["status"] for message in sent if "status" in message] == [400, 400, 400]

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(test(), 30))
        assert [content() for content in contents] == [None, None, None]
    finally:
        gc.enable()
        thread.close()


# Long bodies are read in a process of their own, which may die, and which ends with the server.


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
        (CompletionBody, {"prompt": ["x" * 100_000, "\U0001f600"], "stop": ["a"], "logit_bias": {"3": 1}}),
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
    program = "import time; from llmcli.serve.bodies import BodyReader; BodyReader().start(); time.sleep(60)"
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


# The pieces of a stream: each is OpenAI's object, whatever its text is made of.


TEXTS = ["Once", ' "a" \\', "\0", "\0\u2028é", "\ud7ff\U0001f600", "\n"]
MODEL = "\0"  # the beginning of a piece is not taken for its text


def pieces_of(answer: Answer, text: str) -> list[Any]:
    answer.take(0, Token(1, 97, text))
    return [json.loads(piece) for piece in answer.pieces()]


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_all_pieces_have_the_form_of_openai(kind: type[Answer], includes_usage: bool, tokenizer: Tokenizer) -> None:
    answer = kind(MODEL, [make_request([97], 7, num_samples=2)], tokenizer, includes_usage=includes_usage)
    texts = [*TEXTS, *TEXTS]
    pieces = [piece for text in texts for piece in pieces_of(answer, text)]
    answer.take(0, Finished(1, "!", "", (97,), "length", Timings(1, 0.0, 0.0, 0, 0.0)))
    pieces += [json.loads(piece) for piece in answer.pieces()]
    assert answer.pieces() == []
    usage = {"usage": None} if includes_usage else {}
    for index, (piece, text) in enumerate(zip(pieces, [*texts, "!"], strict=True)):
        assert piece.pop("id") == answer.whole()["id"]
        assert piece.pop("created") == answer.whole()["created"]
        role = {"role": "assistant"} if index == 0 else {}
        content: Any = {"delta": {**role, "content": text}} if kind is ChatAnswer else {"text": text}
        reason = "length" if text == "!" else None
        assert piece == {
            "object": "chat.completion.chunk" if kind is ChatAnswer else "text_completion",
            "model": MODEL,
            "seed": 7,
            "choices": [{"index": 1, **content, "logprobs": None, "finish_reason": reason}],
            **usage,
        }


class ThreeAs:
    """Tokens, several with the same text."""

    def token_bytes(self, token_id: int) -> bytes:
        return {1: b"", 9: b"b"}.get(token_id, b"a")

    def piece(self, token_id: int) -> str:
        return "<s>"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (97, {"a": -0.5, "token_id:98": -1.0, "<s>": -2.0, "token_id:99": -3.0}),
        (98, {"token_id:97": -0.5, "a": -1.0, "<s>": -2.0, "token_id:99": -3.0}),
        (9, {"a": -0.5, "token_id:98": -1.0, "<s>": -2.0, "token_id:99": -3.0, "b": -9.0}),
    ],
)
def test_tokens_of_one_text_do_not_hide_each_other(chosen: int, expected: dict[str, float]) -> None:
    """The chosen one has its text, and its own probability."""
    logprobs = {97: -0.5, 98: -1.0, 1: -2.0, 99: -3.0, 9: -9.0}
    likeliest = tuple(TokenLogprob(token_id, logprobs[token_id]) for token_id in (97, 98, 1, 99))
    view = Inspection(TokenLogprob(chosen, logprobs[chosen]), likeliest, (), ())
    request = replace(make_request([97], 7), num_alternatives=4)
    answer = CompletionAnswer(MODEL, [request], ThreeAs())  # type: ignore[arg-type]
    answer.take(0, Token(0, chosen, "a", view))
    (choice,) = answer.whole()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [expected]


# Prometheus' format, and percentiles equal to numpy's.


def engine() -> EngineState:
    usage = Usage(4, steps=3, row_steps=9, prompt_tokens_computed=50, prompt_tokens_shared=16)
    return EngineState(usage, num_waiting=2, num_pages=8, free_pages=5)


def values(text: str) -> dict[str, float]:
    """Every value by its name and labels; each line must have the format."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if comment := re.fullmatch(r"# (HELP|TYPE) (llmcli_\w+) (.+)", line):
            if comment[1] == "TYPE":
                assert comment[2] not in kinds
                kinds[comment[2]] = comment[3]
            continue
        sample = re.fullmatch(r'(llmcli_\w+)(\{\w+="[^"\\]*"(?:,\w+="[^"\\]*")*\})? (\S+)', line)
        assert sample, line
        name = re.sub(r"_(sum|count)$", "", sample[1])
        assert kinds[name if kinds.get(name) == "summary" else sample[1]] in ("counter", "gauge", "summary")
        assert f"{sample[1]}{sample[2] or ''}" not in found
        found[f"{sample[1]}{sample[2] or ''}"] = float(sample[3])
    return found


def test_counts() -> None:
    metrics = Metrics(new_tokens=70)
    metrics.requests.update([("/v1/completions", 200)] * 3 + [("other", 404)])
    found = values(metrics.text(engine(), 6))
    assert found['llmcli_requests_total{path="/v1/completions",status="200"}'] == 3
    assert found['llmcli_requests_total{path="other",status="404"}'] == 1
    expected = {"texts": 6, "texts_waiting": 2, "rows": 4, "pages": 8, "pages_free": 5, "new_tokens_total": 70}
    assert {name: found[f"llmcli_{name}"] for name in expected} == expected
    assert found["llmcli_request_seconds_count"] == 0


def test_percentiles_are_those_of_the_latest() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 100, 5000):
        metrics = Metrics()
        seconds = [rng.expovariate(1) for _ in range(count)]
        for one in seconds:
            metrics.first_token_seconds.observe(one)
        found = values(metrics.text(engine(), 6))
        for quantile in (0.5, 0.9, 0.99):
            expected = np.quantile(seconds[-2048:], quantile, method="inverted_cdf")
            assert found[f'llmcli_first_token_seconds{{quantile="{quantile}"}}'] == expected
        assert found["llmcli_first_token_seconds_count"] == count
        assert abs(found["llmcli_first_token_seconds_sum"] - sum(seconds)) < 1e-9 * count


# An unread log neither blocks its writer nor fills the memory.


def test_what_finds_no_room_is_counted() -> None:
    may_write, written = threading.Event(), list[str]()

    def write(line: str) -> None:
        may_write.wait(30)
        written.append(line)

    log = LogWriter(write)
    for _ in range(100):
        log.log("x" * 2**20)
    may_write.set()
    while len(written) < 17:  # 16 MiB may wait, and the last one may go beyond
        threading.Event().wait(0.01)
    log.log("the end")
    assert log.close()
    assert [len(line) for line in written[:-2]] == [2**20] * 17
    assert written[-2:] == ["83 lines are missing here, as nobody read the log", "the end"]


# The link between the two processes: a reading end never waits for a writing one.


LARGE = "x" * 400_000  # more than a socket holds
SECONDS = 30


def test_both_ends_may_write_at_once() -> None:
    """Each writes more than the link holds before it reads."""
    here, there = Pipe()
    senders = Sender(here), Sender(there)
    start_time = time.monotonic()
    for index in range(20):
        for sender in senders:
            sender.send(index, LARGE)
    assert time.monotonic() - start_time < SECONDS / 2
    for end in (here, there):
        assert [end.recv()[0] for _ in range(20)] == list(range(20))
    for sender in senders:
        sender.close()


def test_who_makes_many_messages_waits_and_is_let_go() -> None:
    here, there = Pipe()
    sender, has_ended = Sender(here), threading.Event()

    def make() -> None:
        for _ in range(200):
            sender.wait_for_room()
            sender.send(LARGE)
        has_ended.set()

    threading.Thread(target=make, daemon=True).start()
    assert not has_ended.wait(0.3)
    for _ in range(150):
        there.recv()
    there.close()  # a broken link lets both go on, too
    assert has_ended.wait(SECONDS)


@in_loop
async def test_large_requests_states_and_events_pass_each_other(tokenizer: Tokenizer) -> None:
    """The engine's answers fill the link while the front sends large requests and asks for states in a loop."""
    async with open_desk(open_scheduler(tokenizer, num_rows=4), max_waiting=100) as desk:
        num_states = 0

        async def ask() -> None:
            nonlocal num_states
            while True:
                await desk.engine.state()
                num_states += 1

        async def send_large(seed: int) -> None:
            for _ in range(2):
                request = make_request([97], seed, most=1)
                object.__setattr__(request, "stop_strings", (LARGE,) * 4)
                with desk.submit([request]) as texts:
                    async for _ in texts.batches():
                        pass

        askers = [asyncio.create_task(ask()) for _ in range(4)]
        with desk.submit([make_request([97], ENDLESS, num_samples=32, most=900)]) as stream:
            reading = asyncio.create_task(anext(aiter(stream.batches())))  # then it reads no more
            await asyncio.gather(*(send_large(seed) for seed in range(4)))
            await reading
        assert num_states > 10
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
