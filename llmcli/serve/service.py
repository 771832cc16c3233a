"""`Service`: what all routes share: the model, the desk, the limits, and how a body is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from llmcli.errors import TokenizerError, UsageError
from llmcli.schema.held_to import HeldTo
from llmcli.serve.bodies import Body, parse_body
from llmcli.serve.body_reader import BodyReader
from llmcli.serve.desk import Desk
from llmcli.serve.fair_thread import FairThread
from llmcli.serve.leaving import unless_gone
from llmcli.serve.metrics import Metrics
from llmcli.serve.model import ServedModel
from llmcli.serve.refusal import Refusal

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

BODY_SECONDS = 60.0  # for a body to arrive
_SMALL_BODY_BYTES = 64 * 1024  # such a body is parsed at once, in a millisecond
_HELD_BODIES = 4  # bodies of the longest kind that may be in memory together
_BROWSERS_HEADERS = ("origin", "sec-fetch-site")

Kind = TypeVar("Kind", bound=Body)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What a client may take. `timeout_seconds` is for a whole answer with all its waiting; None is no limit."""

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
        """The refusal of an answer that takes longer than it may."""
        return Refusal(504, f"the answer took longer than {self.timeout_seconds:g} s (--timeout)", code="timeout")


class HeldBodies:
    """The bytes of all bodies that are read or served, bounded: many long ones would fill the memory."""

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
        """Forget those of a request, which has its answer."""
        self._num_bytes -= scope["state"].get("body_bytes", 0)


def client_of(request: HttpRequest) -> Hashable:
    """Who asks: one connection. Work is shared out between clients."""
    address: Hashable = request.scope.get("client")
    return address


@dataclass(frozen=True)
class Service:
    """See the module. `log` takes the contents of requests and answers, if they are to be logged."""

    model: ServedModel
    desk: Desk
    limits: Limits
    log_contents: Callable[[str, object], None] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    body_reader: BodyReader = field(default_factory=BodyReader)
    # Waits for long bodies to be read, and writes long answers.
    json_thread: FairThread = field(default_factory=lambda: FairThread("json"))
    # One thread: the model's methods are for one at a time, and templates and long prompts take their time.
    encoder: FairThread = field(default_factory=lambda: FairThread("encoder"))
    # Another, since a schema may take seconds.
    schema_reader: FairThread = field(default_factory=lambda: FairThread("schemas"))
    bodies: HeldBodies = field(default_factory=HeldBodies)

    async def read_schema(self, client: Hashable, held_to: HeldTo) -> Grammar:
        """What texts are held to, for the engine.

        Raises: Refusal for what cannot be held exactly
        """
        try:
            return await self.schema_reader.run(client, lambda: self.model.grammar(held_to))
        except (UsageError, TokenizerError) as error:
            raise Refusal(400, str(error), param=held_to.key.partition(".")[0]) from error

    def close(self) -> None:
        """End the threads; what they do is not waited for."""
        for thread in (self.json_thread, self.encoder, self.schema_reader):
            thread.close()
        self.body_reader.close()

    async def encode(self, request: HttpRequest, work: Callable[[], Result]) -> Result:
        """Do what takes long outside the event loop. Raises: ClientDisconnect if the client leaves before its turn"""
        return await unless_gone(self.encoder.run(client_of(request), work), request.receive)

    async def read(self, kind: type[Kind], request: HttpRequest) -> Kind:
        """The body of a request.

        Raises: Refusal for one that is too long, too slow, not JSON, or asks for what is not supported
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
                    if len(content) > _SMALL_BODY_BYTES:  # who sends little is served beside those who send much
                        self.bodies.take(request.scope, len(chunk), _HELD_BODIES * most)
                    if len(content) > most:
                        raise too_long
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        return bytes(content)


def _check_media_type(headers: Headers) -> None:
    """Raises: Refusal for what a page of another site can send without being asked

    It can send a form, a text, or no media type at all: fetch() does so with a Blob that has none. But then every
    browser says where the page is from, and programs say nothing.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not media_type and not any(name in headers for name in _BROWSERS_HEADERS):
        return
    if media_type != "application/json":
        raise Refusal(415, f"the content type is {media_type[:80]!r}, expected 'application/json'")
