"""`TextsResponse`: runs the texts of one client and sends them, whole or as server-sent events.

When a client leaves or takes too long, its rows are free before the next step. The server's end cancels the response,
which then informs its client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcli.engine.events import Event, Finished, PromptScored, Token
from llmcli.engine.request import Request
from llmcli.errors import DeviceError, UsageError
from llmcli.serve.answers import Answer
from llmcli.serve.desk import Texts
from llmcli.serve.json_text import json_response, large_json_response, to_json
from llmcli.serve.refusal import Refusal, as_refusal, stopped
from llmcli.serve.service import Service, until_gone

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

CLIENT_LEFT = 499  # nginx's number for the log; it is never sent
_LAST_WORD_SECONDS = 1.0  # to inform a slow reader that its time is over
_EVENTS_AT_ONCE = 64  # of a stream; a batch that has waited for its reader may have thousands

_LARGE_ANSWER_TOKENS = 5000  # with their alternatives: ten milliseconds for the event loop

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy should pass pieces on as they come
]


@dataclass
class TextsResponse:
    """See the module. With `is_stream` pieces are sent as they come; while a client reads slowly they are joined.

    `deadline` is the event loop's time at which the answer must have ended, None for no limit.
    """

    service: Service
    requests: Sequence[Request]
    answer: Answer
    is_stream: bool
    deadline: float | None
    grammar: Grammar | None = None  # that the texts follow
    _start_time: float = field(default_factory=time.perf_counter)
    _has_begun: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application. Raises: Refusal, LLMCliError, while no piece has been sent"""
        state = scope["state"]
        with self.service.desk.submit(self.requests, self.grammar, in_pieces=self.is_stream) as texts:
            answering = asyncio.ensure_future(self._answer(texts, scope, receive, send))
            leaving = asyncio.ensure_future(until_gone(receive))
            try:
                loop = asyncio.get_running_loop()
                timeout = None if self.deadline is None else max(self.deadline - loop.time(), 0.0)
                await asyncio.wait((answering, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                is_stopped = False
            except asyncio.CancelledError:
                is_stopped = True
            finally:
                is_answered, is_gone = answering.done(), leaving.done()
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
        try:
            if is_answered:
                self._result(answering)
            elif is_gone:
                state["status"] = CLIENT_LEFT
            else:
                raise stopped() if is_stopped else self.service.limits.too_slow()
        except Exception as error:
            if not self._has_begun:
                raise
            await self._end_stream(as_refusal(error), state, send)
        finally:
            self._count(texts, state)

    async def _answer(self, texts: Texts, scope: Scope, receive: Receive, send: Send) -> None:
        async for batch in texts.batches():
            if not self.is_stream:
                self._take(batch)
                continue
            for first in range(0, len(batch), _EVENTS_AT_ONCE):
                self._take(batch[first : first + _EVENTS_AT_ONCE])
                await self._send_pieces(self.answer.pieces(), send)
                if first + _EVENTS_AT_ONCE < len(batch):
                    await asyncio.sleep(0)
        if not self.is_stream:
            await (await self._whole(scope))(scope, receive, send)
            return
        if self.answer.includes_usage:
            await self._send_pieces([self.answer.usage_piece()], send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _whole(self, scope: Scope) -> Response:
        """The answer in one piece; a large one is made in a thread."""
        alternatives = self.requests[0].num_alternatives or 0
        if self.answer.num_new_tokens * (1 + alternatives) < _LARGE_ANSWER_TOKENS:
            response = json_response(self.answer.whole())
        else:
            thread, client = self.service.json_thread, scope.get("client")
            response = await thread.run(client, lambda: large_json_response(self.answer.whole()))
        self._has_begun = True
        return response

    def _take(self, events: Sequence[tuple[int, Event]]) -> None:
        for request, event in events:
            if isinstance(event, Token | Finished | PromptScored):
                self.answer.take(request, event)

    async def _send_pieces(self, pieces: Sequence[bytes], send: Send) -> None:
        if not pieces:
            return
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        body = b"".join([b"data: %b\n\n" % piece for piece in pieces])
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end_stream(self, refusal: Refusal, state: dict[str, Any], send: Send) -> None:
        """Report the end in the stream's last piece, since the status has been sent already."""
        state["status"] = refusal.status
        body = b"data: " + to_json(refusal.as_json()) + b"\n\n"
        message = {"type": "http.response.body", "body": body, "more_body": False}
        try:
            await asyncio.wait_for(send(message), _LAST_WORD_SECONDS)
        except TimeoutError:
            return  # the connection is closed after an answer that has no end

    def _result(self, answering: asyncio.Future[None]) -> None:
        """Raises: the error, if any; for a fault of the device it adds whether others are served"""
        try:
            answering.result()
        except UsageError as error:
            if self.grammar is None:
                raise
            key = self.grammar.name.partition(".")[0]  # as of response_format.json_schema.schema
            raise Refusal(400, str(error), param=key) from error
        except DeviceError as error:
            is_over = self.service.desk.engine.fault is not None
            what = "the server cannot continue; restart it" if is_over else "other requests are served"
            raise Refusal(500, f"{error}; {what}", code="device_failed") from error

    def _count(self, texts: Texts, state: dict[str, Any]) -> None:
        """Log and count what was generated, also for a client that has left before the end."""
        answer, metrics = self.answer, self.service.metrics
        self._take(texts.untaken())
        if texts.first_token_time is not None:
            metrics.first_token_seconds.observe(texts.first_token_time - self._start_time)
        metrics.request_seconds.observe(time.perf_counter() - self._start_time)
        metrics.new_tokens += answer.num_new_tokens
        prompt = f"{answer.num_prompt_tokens} prompt tokens ({answer.num_cached_tokens} cached)"
        reasons = " ".join(end.finish_reason for end in answer.ends) or "not finished"
        state["note"] = f"{prompt}, {answer.num_new_tokens} new tokens, {reasons}"
        notes = () if self.grammar is None else self.grammar.notes
        if notes:  # they quote the schema, so without --log-contents only their number is logged
            state["note"] += f", {len(notes)} of the schema's keywords and formats bind nothing"
        if self.service.log_contents is not None:
            self.service.log_contents("answer", answer.texts)
            if notes:
                self.service.log_contents("schema", notes)
