"""One client's texts as an ASGI application: slow readers, timeouts, faults of the device."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from loop import in_loop
from paged import ENDLESS, ids_alone, make_request, open_desk, open_scheduler
from tiny_models import EOS_ID, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Request
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import DeviceError, InsufficientMemoryError
from llmcli.runners.numpy.load import load
from llmcli.schema.grammar import Grammar, lark_grammar
from llmcli.schema.library import MaskLimits, Matcher
from llmcli.schema.schema import Schema, Vocabulary
from llmcli.serve.answers import CompletionAnswer, TextsResponse
from llmcli.serve.app import Gate
from llmcli.serve.service import ClientLimits, Desk, Service
from llmcli.tokenizer.base import Tokenizer

SECONDS = 30


class NoModel:
    """A model that is never used here."""


@dataclass
class Client:
    """The other side of an ASGI application. It reads while `reads` is set, and leaves when `leaves` is."""

    reads: asyncio.Event = field(default_factory=asyncio.Event)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    body: bytes = b""
    num_messages: int = 0

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self.num_messages += 1

    def pieces(self) -> list[Any]:
        """The objects of a stream."""
        parts = self.body.split(b"\n\n")
        return [json.loads(part.removeprefix(b"data: ")) for part in parts if part.startswith(b"data: {")]

    def text(self) -> str:
        """The first text of a stream so far."""
        choices = [choice for piece in self.pieces() for choice in piece.get("choices", [])]
        return "".join(choice["text"] for choice in choices if choice["index"] == 0)


class Server:
    """A desk over a scheduler without a model, behind the gate."""

    def __init__(self, desk: Desk, scheduler: Scheduler, tokenizer: Tokenizer, timeout: float | None = None):
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.desk = desk
        self.logged: list[object] = []
        limits = ClientLimits(1000, timeout)
        self.service = Service(NoModel(), self.desk, limits, lambda _, it: self.logged.append(it))  # type: ignore[arg-type]
        self.lines: list[str] = []

    def check_counts(self, request: Request, sent: str) -> None:
        """An unfinished text is logged and counted; all that was sent is part of it."""
        ((text, *others),) = cast(list[list[str]], self.logged)
        whole = bytes(ids_alone(request, 0)).decode()
        assert text
        assert whole.startswith(text)
        assert text.startswith(sent)
        num_tokens = len(text) + sum(map(len, others))  # each token is a letter
        assert self.service.metrics.new_tokens == num_tokens
        if sent or " 504 " not in self.lines[0]:  # else the line gives the reason, as the client's error does
            assert f" {num_tokens} new tokens, not finished" in self.lines[0]

    async def serve(
        self, client: Client, requests: list[Any], *, is_stream: bool, grammar: Grammar | None = None
    ) -> None:
        answer = CompletionAnswer("pages", requests, self.tokenizer)
        async with self.service.limits.timed() as deadline:
            response = TextsResponse(self.service, requests, answer, is_stream, deadline, grammar)
        gate = Gate(response, None, (), self.service.metrics, ("/texts",), self.lines.append)
        scope = {"type": "http", "method": "POST", "path": "/texts", "raw_path": b"/texts", "headers": []}
        await asyncio.wait_for(gate(scope, client.receive, client.send), SECONDS)


@pytest.fixture
def run_test(tokenizer: Tokenizer) -> Callable[..., None]:
    """Run a coroutine with a server, whose worker ends with it and has all its pages then."""

    def run(test: Callable[[Server, Client], Any], timeout: float | None = None) -> None:
        async def body() -> None:
            scheduler, client = open_scheduler(tokenizer), Client()
            async with open_desk(scheduler, max_waiting=100) as desk:
                server = Server(desk, scheduler, tokenizer, timeout)
                await test(server, client)
            assert desk.num_texts == 0
            runner = server.scheduler.runner
            assert runner.free_pages == runner.limits.num_pages

        asyncio.run(body())

    return run


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_true():
            await asyncio.sleep(0.01)


def test_a_slow_reader_holds_no_row_and_gets_fewer_longer_pieces(run_test: Callable[..., None]) -> None:
    async def test(server: Server, client: Client) -> None:
        requests = [make_request([97, 98], 5, num_samples=3, most=60)]
        serving = asyncio.create_task(server.serve(client, requests, is_stream=True))
        await until(lambda: server.scheduler.usage.steps > 0 and server.scheduler.is_idle)
        assert client.body == b""
        client.reads.set()
        await serving
        texts, num_pieces = ["", "", ""], 0
        for piece in client.pieces():
            (choice,) = piece["choices"]
            texts[choice["index"]] += choice["text"]
            num_pieces += 1
        expected = [bytes(token for token in ids_alone(requests[0], k) if token < 256).decode() for k in range(3)]
        assert texts == expected
        # For each text: the first piece, the pieces while nobody read, those still in transit then, and its end.
        assert num_pieces <= 4 * 3 < min(map(len, expected))
        assert client.body.endswith(b"data: [DONE]\n\n")

    run_test(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_texts(
    run_test: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    async def test(server: Server, client: Client) -> None:
        client.reads.set()
        step = server.scheduler.step
        monkeypatch.setattr(server.scheduler, "step", lambda: time.sleep(0.01) or step())  # it leaves before the end
        serving = asyncio.create_task(
            server.serve(client, [request := make_request([97], ENDLESS, 2, most=900)], is_stream=is_stream)
        )
        await until(lambda: server.scheduler.usage.steps > 5)
        client.leaves.set()
        await serving
        await until(lambda: server.scheduler.is_idle)
        assert " 499 " in server.lines[0]
        server.check_counts(request, client.text())
        assert bool(client.text()) == is_stream

    run_test(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_time_runs_out(run_test: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    """An answer that has not begun becomes a 504; a stream ends with an error."""

    async def test(server: Server, client: Client) -> None:
        client.reads.set()
        step = server.scheduler.step
        monkeypatch.setattr(server.scheduler, "step", lambda: time.sleep(0.05) or step())
        request = make_request([97], ENDLESS, most=900)
        await server.serve(client, [request], is_stream=is_stream)
        server.check_counts(request, client.text())
        assert client.status == (200 if is_stream else 504)
        error = (client.pieces()[-1] if is_stream else json.loads(client.body))["error"]
        assert error["message"] == "the answer took longer than 0.3 s (--timeout)"
        assert b"[DONE]" not in client.body
        assert " 504 " in server.lines[0]

    run_test(test, timeout=0.3)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (DeviceError("the card is gone"), "the card is gone; the server cannot continue; restart it"),
        (InsufficientMemoryError("out of memory"), "out of memory; other requests are served"),
        (KeyError("row"), "internal error, please report it: KeyError: 'row'; the server cannot continue; restart it"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_fault_is_told_with_what_follows(
    run_test: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fault: Exception, what: str, is_stream: bool
) -> None:
    async def test(server: Server, client: Client) -> None:
        client.reads.set()
        step, faults = server.scheduler.step, [fault]

        def fail_once() -> Any:
            if faults and server.scheduler.usage.steps > 10:
                while is_stream and not client.body:  # on a busy machine all steps could end before the first piece
                    time.sleep(0.001)
                raise faults.pop()
            return step()

        monkeypatch.setattr(server.scheduler, "step", fail_once)
        await server.serve(client, [make_request([97], ENDLESS, most=900)], is_stream=is_stream)
        error = (client.pieces()[-1] if is_stream else json.loads(client.body))["error"]
        assert (error["message"], error["code"]) == (what, "device_failed")
        assert client.status == (200 if is_stream else 500)
        after = Client()
        after.reads.set()
        await server.serve(after, [make_request([97], 4)], is_stream=is_stream)
        assert after.status == (200 if isinstance(fault, InsufficientMemoryError) else 503)

    run_test(test)


@pytest.mark.parametrize("is_stream", [False, True])
@in_loop
async def test_a_grammar_that_gives_up_within_a_text_is_told(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """A stream ends with an error, a whole answer becomes one; the next request is served."""
    grammar = lark_grammar("grammar", f'start: s {"x " * 12}\ns: {"s " * 40}| x | ""\nx: "x"\n')
    monkeypatch.setattr(Matcher.__init__, "__defaults__", (MaskLimits(max_items_in_row=400),))
    opened = open_model(write_tiny_llama(tmp_path / "model"))
    vocabulary = Vocabulary(tokenizer, {EOS_ID}, opened.config.vocab_size)
    scheduler = Scheduler(load(opened, max_seq_len=128, num_rows=2), tokenizer)

    def hold(request: Request, grammar: Grammar) -> Request:
        return replace(request, schema=Schema(grammar, vocabulary))

    client, after = Client(), Client()
    client.reads.set()
    after.reads.set()
    async with open_desk(scheduler, max_waiting=9, hold=hold) as desk:
        server = Server(desk, scheduler, tokenizer)
        await server.serve(client, [make_request([97], 1, most=60)], is_stream=is_stream, grammar=grammar)
        await server.serve(after, [make_request([97], 1, most=3)], is_stream=False)
    error = (client.pieces()[-1] if is_stream else json.loads(client.body))["error"]
    assert error["message"].startswith("grammar is too complex for the rest of this text (")
    assert "\n" not in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "grammar")
    assert client.status == (200 if is_stream else 400)
    assert client.text() == ("x" * len(client.text()) if is_stream else "")
    assert bool(client.text()) == is_stream
    assert b"[DONE]" not in client.body
    assert " 400 " in server.lines[0]
    assert after.status == 200
