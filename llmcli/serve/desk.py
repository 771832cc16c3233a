"""`Desk`: passes requests from the routes to the engine, and events back.

Bounds how many texts wait. All methods are for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from llmcli.engine.events import Event, Failed, Finished, Token
from llmcli.engine.remote.link import FrontEnd
from llmcli.engine.request import Request
from llmcli.serve.refusal import Refusal

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key in self._keys:
            self._desk.end(key)
        self._end(self._num_open)


class Desk:
    """See the module.

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
