"""What all routes share: `Service`, the model, the counters, the thread for long work, and clients that leave."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from llmcli.engine.chat_events import Start
from llmcli.engine.remote.link import EngineState, FrontEnd
from llmcli.engine.request import Event, Failed, Finished, Request, Token
from llmcli.errors import TokenizerError, UsageError
from llmcli.schema.constraint import Constraint
from llmcli.serve.bodies import BodyReader, ChatBody, CompletionBody, Kind, parse_body
from llmcli.serve.refusal import Refusal
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.tool_offer import Offer

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

# `Desk`: passes requests from the routes to the engine, and events back.
#
# Bounds how many texts wait. All methods are for the event loop's thread.


class Texts:
    """The texts of one client, from one request or several; leaving the `with` cancels what has not ended.

    Events wait here until the client takes them. There are at most as many as the texts have tokens.

    Attributes: first_token_time: by time.perf_counter; None before the first token
    """

    def __init__(self, desk: Desk, requests: Sequence[Request], grammar: Grammar | None, *, in_pieces: bool):
        self.requests = requests
        self.first_token_time: float | None = None
        self._desk = desk
        self._in_pieces = in_pieces
        self._events: list[tuple[int, Event]] = []
        self._reader: asyncio.Future[None] | None = None  # waits for a batch
        self._num_open = sum(len(request.samples) for request in requests)
        desk.num_texts += self._num_open
        self._keys = {desk.begin(self, request, grammar): index for index, request in enumerate(requests)}

    @property
    def num_open(self) -> int:
        """Texts that have not ended."""
        return self._num_open

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield all events since the last batch, each with the index of its request, until all texts have ended.

        Without `in_pieces` there is one batch: waking for each of many clients at each token costs as much as the rest.

        Raises: the error of a text that failed
        """
        while self._num_open or self._events:
            if not self._events or (self._num_open and not self._in_pieces):
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            events, self._events = self._events, []
            for _, event in events:
                if isinstance(event, Failed):
                    raise event.error
            yield events

    def untaken(self) -> list[tuple[int, Event]]:
        """Events that were in no batch, for a client that leaves before the end."""
        return self._events

    def take(self, key: int, event: Event) -> None:
        """Note an event of one of the requests."""
        if key not in self._keys or self._num_open == 0:  # one has failed, which ends all
            return
        if isinstance(event, Failed):
            self._end(self._num_open)
        elif isinstance(event, Finished):
            self._end(1)
        elif isinstance(event, Token) and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self._events.append((self._keys[key], event))
        if (self._in_pieces or self._num_open == 0) and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _end(self, count: int) -> None:
        self._num_open -= count
        self._desk.num_texts -= count

    def __enter__(self) -> Texts:
        return self

    def __exit__(self, *error: object) -> None:
        for key in self._keys:
            self._desk.end(key)
        self._end(self._num_open)


class Desk:
    """See above.

    Attributes: num_texts: texts that wait or run
    """

    def __init__(self, engine: FrontEnd, *, max_waiting: int):
        """`max_waiting` texts may wait besides those that have a row."""
        self.engine = engine
        self.num_texts = 0
        self._max_texts = max_waiting + engine.begin_state.usage.num_rows
        self._max_waiting = max_waiting
        self._texts: dict[int, Texts] = {}
        engine.take = self._take

    def submit(self, requests: Sequence[Request], grammar: Grammar | None = None, *, in_pieces: bool = True) -> Texts:
        """Begin the texts of some requests, held to `grammar` if given. Use the result in a `with`.

        `in_pieces` is for `Texts.batches`.

        Raises: Refusal if too many texts wait, or if the device has failed
        """
        if (fault := self.engine.fault) is not None:
            raise Refusal(503, f"{fault}; the server cannot continue; restart it", code="device_failed")
        num_new = sum(len(request.samples) for request in requests)
        self._refuse_too_many(num_new, "prompt" if len(requests) > 1 else "n")
        return Texts(self, requests, grammar, in_pieces=in_pieces)

    @contextmanager
    def waiting(self, num_new: int, param: str) -> Iterator[None]:
        """Count texts that cannot begin yet, while their prompts are encoded or their schema is read.

        `param` is the key that sets their number. Raises: Refusal if too many texts wait
        """
        self._refuse_too_many(num_new, param)
        self.num_texts += num_new
        try:
            yield
        finally:
            self.num_texts -= num_new

    def _refuse_too_many(self, num_new: int, param: str) -> None:
        """Raises: Refusal; a 429, which clients try again, only if waiting helps"""
        if num_new > self._max_texts:
            rows = self._max_texts - self._max_waiting
            raise Refusal(
                400,
                f"the request asks for {num_new} texts, expected at most {self._max_texts}: {rows} that run and "
                f"{self._max_waiting} that may wait (--max-queue); send several requests",
                param=param,
            )
        if self.num_texts + num_new > self._max_texts:
            raise Refusal(
                429,
                f"{self.num_texts} texts are waiting or running and this request adds {num_new}; "
                f"at most {self._max_waiting} may wait; try again later",
                code="queue_full",
            )

    def begin(self, texts: Texts, request: Request, grammar: Grammar | None) -> int:
        """Hand over one request of `texts`; return its number."""
        key = self.engine.submit(request, grammar)
        self._texts[key] = texts
        return key

    def end(self, key: int) -> None:
        """Forget a request; cancel what is left of it."""
        if self._texts.pop(key, None) is not None:
            self.engine.cancel(key)

    def _take(self, events: Sequence[tuple[int, Event]]) -> None:
        for key, event in events:
            if (texts := self._texts.get(key)) is not None:
                texts.take(key, event)


# `ServedModel`: what the server needs to know of a model. The command line makes it from its session.

Messages = Sequence[Mapping[str, Any]]


class Asked(NamedTuple):
    """Texts that answer a conversation.

    `constraint` is what they are held to, `start` what they begin with, and `offer` the tools that they may call.
    """

    request: Request
    constraint: Constraint | None
    start: Start
    offer: Offer | None


class ServedModel(Protocol):
    """Turns bodies into requests of one model. Methods may take long; each is called by one thread at a time.

    Each raises UsageError or TokenizerError for what this model cannot do; Refusal if the wrong key is known.
    """

    @property
    def names(self) -> Sequence[str]:
        """The model's names in requests; the first is its own."""

    @property
    def context(self) -> int:
        """The most tokens of prompt and new text together."""

    @property
    def seed(self) -> int | None:
        """The seed of requests that give none; if None, each gets a random one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def answer(self, body: ChatBody) -> Asked:
        """Texts that answer a conversation."""

    def completion(self, body: CompletionBody, prompt: str | Sequence[int]) -> Request:
        """Texts that continue one of a body's prompts. Token ids are used as they are."""

    def grammar(self, constraint: Constraint) -> Grammar:
        """The grammar of texts, for the engine. For a separate thread: a schema may take seconds."""

    def encode(self, prompt: str | Messages) -> Sequence[int]:
        """The token ids of a prompt, or of a conversation in the chat template."""


# The server's counters, in Prometheus's text format.

_QUANTILES = (0.5, 0.9, 0.99)
_NUM_KEPT = 2048


@dataclass
class Summary:
    """Durations: all are counted, and the latest give the percentiles. Unit: seconds"""

    count: int = 0
    total: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.count += 1
        self.total += seconds
        self.latest.append(seconds)


@dataclass
class Metrics:
    """Counts since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    new_tokens: int = 0
    request_seconds: Summary = field(default_factory=Summary)
    first_token_seconds: Summary = field(default_factory=Summary)

    def text(self, engine: EngineState, num_texts: int) -> str:
        """The page for Prometheus; `num_texts` wait or run."""
        return "".join(f"{line}\n" for line in self._lines(engine, num_texts))

    def _lines(self, engine: EngineState, num_texts: int) -> Iterator[str]:
        usage = engine.usage
        requests = [
            (f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(self.requests.items())
        ]
        yield from _metric("requests_total", "counter", "Requests that have ended", requests)
        yield from _metric("texts_waiting", "gauge", "Texts that have no row yet", [("", engine.num_waiting)])
        yield from _metric("texts", "gauge", "Texts that wait or run", [("", num_texts)])
        yield from _metric("rows", "gauge", "Texts that can run side by side", [("", usage.num_rows)])
        yield from _metric("pages", "gauge", "Pages of the KV cache", [("", engine.num_pages)])
        yield from _metric("pages_free", "gauge", "Pages that no text holds", [("", engine.free_pages)])
        for name, what, count in (
            ("steps_total", "Steps of the model", usage.steps),
            ("row_steps_total", "Steps, times the rows in use", usage.row_steps),
            ("preemptions_total", "Texts that had to give their pages back for a while", usage.preemptions),
            ("prompt_tokens_computed_total", "Tokens of prompts that were run", usage.prompt_tokens_computed),
            ("prompt_tokens_shared_total", "Tokens of prompts whose pages were there", usage.prompt_tokens_shared),
            ("new_tokens_total", "New tokens of requests that have ended", self.new_tokens),
        ):
            yield from _metric(name, "counter", what, [("", count)])
        yield from _summary("request_seconds", "Time of a request for texts", self.request_seconds)
        yield from _summary("first_token_seconds", "Time to a request's first token", self.first_token_seconds)


def _metric(name: str, kind: str, what: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP llmcli_{name} {what}."
    yield f"# TYPE llmcli_{name} {kind}"
    for labels, value in values:
        yield f"llmcli_{name}{labels} {value}"


def _summary(name: str, what: str, summary: Summary) -> Iterator[str]:
    ordered = sorted(summary.latest)
    values = [
        (f'{{quantile="{quantile}"}}', ordered[math.ceil(quantile * len(ordered)) - 1])
        for quantile in _QUANTILES
        if ordered
    ]
    yield from _metric(name, "summary", what, values)
    yield f"llmcli_{name}_sum {summary.total}"
    yield f"llmcli_{name}_count {summary.count}"


# `FairThread`: one thread that works for many clients in turn, so that large requests delay nobody else long.


class FairThread:
    """See above. Its methods are for the event loop's thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        # The work of each waiting client, in order. The next client comes first.
        self._waiting: dict[Hashable, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        self._is_busy = False

    async def run(self, client: Hashable, work: Callable[[], Result]) -> Result:
        """The result of some work, once the client's turn has come. If cancelled before, it is not done.

        Raises: what the work raises
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((work, result))
        self._begin_next()
        try:
            return await result
        finally:
            del result  # else error, traceback and this frame would be a reference cycle, which keeps a long body

    def close(self) -> None:
        """End the thread without waiting for its work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while self._waiting and not self._is_busy:
            client = next(iter(self._waiting))
            of_client = self._waiting.pop(client)
            while of_client and of_client[0][1].cancelled():
                of_client.popleft()
            if not of_client:
                continue
            work, result = of_client.popleft()
            if of_client:
                self._waiting[client] = of_client  # after the others
            self._is_busy = True
            doing = result.get_loop().run_in_executor(self._thread, work)
            doing.add_done_callback(partial(self._end, result))

    def _end(self, result: asyncio.Future[Any], doing: asyncio.Future[Any]) -> None:
        self._is_busy = False
        self._begin_next()
        if doing.cancelled():
            return
        error = doing.exception()
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(doing.result())


# Work for a client that may leave: cancelled once nobody waits for it.


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of some work for a client whose body has been read. Raises: ClientDisconnect once it leaves"""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working  # else error, traceback and this frame would be a reference cycle


async def until_gone(receive: Receive) -> None:
    """Wait until a client leaves whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


# `Service`: what all routes share: the model, the desk, the limits, and the reading of bodies.

BODY_SECONDS = 60.0  # for a body to arrive
_SMALL_BODY_BYTES = 64 * 1024  # such a body is parsed at once, in a millisecond
_HELD_BODIES = 4  # bodies of the greatest length that may be in memory together
_BROWSERS_HEADERS = ("origin", "sec-fetch-site")

Result = TypeVar("Result")


@dataclass(frozen=True)
class ClientLimits:
    """What a client may use. `timeout_seconds` is for a whole answer with all its waiting; None is no limit."""

    max_body_bytes: int
    timeout_seconds: float | None

    @asynccontextmanager
    async def timed(self) -> AsyncIterator[float | None]:
        """Limit the time of an answer. Yields its deadline, in the event loop's time.

        Raises: Refusal if it takes longer
        """
        loop = asyncio.get_running_loop()
        deadline = None if self.timeout_seconds is None else loop.time() + self.timeout_seconds
        try:
            async with asyncio.timeout_at(deadline):
                yield deadline
        except TimeoutError:
            raise self.too_slow() from None

    def too_slow(self) -> Refusal:
        """The refusal of an answer that takes too long."""
        return Refusal(504, f"the answer took longer than {self.timeout_seconds:g} s (--timeout)", code="timeout")


class HeldBodies:
    """Bounds the bytes of all bodies that are read or served: many long ones would fill the memory."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def take(self, scope: Scope, count: int, most: int) -> None:
        """Count more bytes of a request. Raises: Refusal if there are more than `most` in all"""
        if self._num_bytes + count > most:
            message = f"the requests that are served hold {most} bytes already; try again later"
            raise Refusal(429, message, code="too_many_bytes")
        self._num_bytes += count
        scope["state"]["body_bytes"] = scope["state"].get("body_bytes", 0) + count

    def give_back(self, scope: Scope) -> None:
        """Forget the bytes of a request that has its answer."""
        self._num_bytes -= scope["state"].get("body_bytes", 0)


def client_of(request: HttpRequest) -> Hashable:
    """The client: one connection. Work is shared out between clients."""
    address: Hashable = request.scope.get("client")
    return address


@dataclass(frozen=True)
class Service:
    """See above. `log` takes the contents of requests and answers, if they are to be logged."""

    model: ServedModel
    desk: Desk
    limits: ClientLimits
    log_contents: Callable[[str, object], None] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    body_reader: BodyReader = field(default_factory=BodyReader)
    # Waits until long bodies are read, and writes long answers.
    json_thread: FairThread = field(default_factory=lambda: FairThread("json"))
    # One thread: the model's methods run one at a time, and templates and long prompts take their time.
    encoder: FairThread = field(default_factory=lambda: FairThread("encoder"))
    # Another thread, since a schema may take seconds.
    schema_reader: FairThread = field(default_factory=lambda: FairThread("schemas"))
    bodies: HeldBodies = field(default_factory=HeldBodies)

    async def read_schema(self, client: Hashable, constraint: Constraint) -> Grammar:
        """The grammar of texts, for the engine. Raises: Refusal for what cannot be followed exactly"""
        try:
            return await self.schema_reader.run(client, lambda: self.model.grammar(constraint))
        except (UsageError, TokenizerError) as error:
            raise Refusal(400, str(error), param=constraint.key.partition(".")[0]) from error

    def close(self) -> None:
        """End the threads without waiting for their work."""
        for thread in (self.json_thread, self.encoder, self.schema_reader):
            thread.close()
        self.body_reader.close()

    async def encode(self, request: HttpRequest, work: Callable[[], Result]) -> Result:
        """Do slow work outside the event loop. Raises: ClientDisconnect if the client leaves before its turn"""
        return await unless_gone(self.encoder.run(client_of(request), work), request.receive)

    async def read(self, kind: type[Kind], request: HttpRequest) -> Kind:
        """The body of a request.

        Raises: Refusal for one that is too long, too slow, not JSON, or asks for something unsupported
        """
        _check_media_type(request.headers)
        content = await self._content(request)
        if len(content) <= _SMALL_BODY_BYTES:
            body = parse_body(kind, content)
        else:
            work = self.json_thread.run(client_of(request), lambda: self.body_reader.read(kind, content))
            body = await unless_gone(work, request.receive)
        model = getattr(body, "model", None)
        if model is not None and model not in self.model.names:
            expected = " or ".join(map(repr, self.model.names))
            message = f"the model {model[:200]!r} is not served here, expected {expected}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return body

    async def _content(self, request: HttpRequest) -> bytes:
        most = self.limits.max_body_bytes
        too_long = Refusal(413, f"the body is longer than {most} bytes (--max-body)", code="body_too_long")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_long
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > _SMALL_BODY_BYTES:  # small bodies are served next to large ones
                        self.bodies.take(request.scope, len(chunk), _HELD_BODIES * most)
                    if len(content) > most:
                        raise too_long
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        return bytes(content)


def _check_media_type(headers: Headers) -> None:
    """Raises: Refusal for what a page of another site can send without permission

    It can send a form, a text, or no media type at all: fetch() does so with a Blob that has none. But then every
    browser says where the page is from, and programs say nothing.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not media_type and not any(name in headers for name in _BROWSERS_HEADERS):
        return
    if media_type != "application/json":
        raise Refusal(415, f"the content type is {media_type[:80]!r}, expected 'application/json'")
