"""OpenAI's forms of an answer: whole, or in the pieces of a stream. Pure functions of events.

Besides OpenAI's keys each object has `seed`, which gives the same texts again.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcli.engine.chat_events import ReasoningSplitter, Start
from llmcli.engine.request import Event, Finished, PromptScored, Request, Token
from llmcli.errors import DeviceError, UsageError
from llmcli.openai_body import finish_reason_of, message_of
from llmcli.sampling.inspect import Inspection, TokenLogprob
from llmcli.serve.refusal import Refusal, as_refusal, json_response, large_json_response, stopped, to_json
from llmcli.serve.service import Service, Texts, until_gone
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.tool_offer import Offer
from llmcli.tool_calls import Call, CallBegun, CallReader, Content, Said, openai_call

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

Object = dict[str, Any]

_MARK = "\0"  # stands for a text; no later part of a piece can hold it
_LEAST_LOGPROB = -9999.0  # OpenAI's number for what JSON cannot express


@dataclass
class Choice:
    """One text: what has not been sent yet, all of it so far, and its end once that has come."""

    text: str = ""
    reasoning: str = ""  # not sent yet; it comes before the text
    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # with those of its tags
    tokens: list[Token] = field(default_factory=list)
    num_told: int = 0  # characters
    has_begun: bool = False
    end: Finished | None = None
    is_over: bool = False  # its end has been sent
    splitter: ReasoningSplitter = field(default_factory=lambda: ReasoningSplitter("answer"))
    reader: CallReader | None = None  # of what comes after the reasoning, if it may call tools
    calls: dict[int, Object] = field(default_factory=dict)  # by number; what has not been sent yet of each
    num_calls: int = 0
    origin: tuple[object, ...] = ()  # what decides the text
    frames: dict[bool, tuple[bytes, bytes]] = field(default_factory=dict)  # a usual piece's JSON around its text

    def tell(self) -> None:
        """Mark everything so far as sent."""
        self.num_told += len(self.text)
        self.text, self.reasoning, self.tokens, self.calls = "", "", [], {}
        self.has_begun, self.is_over = True, self.end is not None

    def say(self, pieces: Sequence[Said]) -> None:
        """Take content and calls."""
        for piece in pieces:
            if isinstance(piece, Content):
                self.text += piece.text
            elif isinstance(piece, CallBegun):
                self.calls[self.num_calls] = openai_call(Call(piece.name), (*self.origin, self.num_calls))
                self.num_calls += 1
            else:
                more: Object = {"function": {"arguments": ""}}
                self.calls.setdefault(self.num_calls - 1, more)["function"]["arguments"] += piece.text

    @property
    def has_news(self) -> bool:
        """Whether a stream has anything to send."""
        return bool(self.text or self.reasoning or self.calls or self.tokens or self.end is not None)


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent before its texts: its text, and what each of its tokens adds to it."""

    text: str
    pieces: Sequence[str]


class Answer(ABC):
    """What a client gets of its texts. All requests have as many samples; choices are numbered through.

    Attributes: includes_usage: whether a stream ends with a piece that has the numbers of tokens
    """

    prefix: str
    whole_kind: str
    piece_kind: str
    stream_end = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        includes_usage: bool = False,
        counts_in_pieces: bool = False,
        echoes: Sequence[Echo] = (),
        start: Start = "answer",
        offer: Offer | None = None,
    ):
        """With `counts_in_pieces` each piece of a stream has the numbers of tokens so far. `echoes` by request.

        `start` is what each text begins with, `offer` the tools that it may call.
        """
        self.includes_usage = includes_usage
        self._counts_in_pieces = counts_in_pieces
        self._echoes = echoes
        self._views: list[dict[int, Inspection]] = [{} for _ in requests]  # of each prompt's tokens, by position
        self._requests = requests
        self._tokenizer = tokenizer
        self._has_logprobs = requests[0].num_alternatives is not None
        self._head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": requests[0].sampler.seed,
        }
        self._samples = len(requests[0].samples)
        self._choices = [
            Choice(
                splitter=ReasoningSplitter(start),
                reader=None if offer is None else offer.reader(),
                origin=(request.prompt_token_ids, request.sampler.seed, sample),
            )
            for request in requests
            for sample in request.samples
        ]
        self._computed: dict[int, int] = {}  # prompt tokens that were run, by request

    def take(self, request: int, event: Token | Finished | PromptScored) -> None:
        """Note an event of the request of that index."""
        if isinstance(event, PromptScored):
            self._views[request].update(enumerate(event.views, start=event.first))
            return
        choice = self._choices[request * self._samples + event.sample]
        if self._echoes and not choice.parts:
            self._echo(choice, request)
        if isinstance(event, Token):
            choice.num_tokens += 1
            choice.parts.append(event.text)
            self._add(choice, event.text)
            is_end = event.token_id in self._requests[request].sampler.eos_token_ids
            if self._has_logprobs and (self._echoes or not is_end):  # scores of a prompt include the last token
                choice.tokens.append(event)
        else:
            choice.parts.append(event.tail)
            choice.end = event
            self._add(choice, event.tail)
            self._computed[request] = event.timings.prefill_tokens

    def _add(self, choice: Choice, text: str) -> None:
        """Take the next part of a text; it is the last one if the text has its end."""
        splitter = choice.splitter
        if splitter.is_answer and choice.reader is None:  # the way below doubles the time of a piece
            choice.text += text
            return
        was_inside = splitter.is_inside
        pieces = splitter.push(text)
        if was_inside or splitter.is_inside or any(piece.part == "reasoning" for piece in pieces):
            choice.num_reasoning_tokens = choice.num_tokens
        for piece in pieces if choice.end is None else [*pieces, *splitter.flush()]:
            if piece.part == "reasoning":
                choice.reasoning += piece.text
            elif choice.reader is None:
                choice.text += piece.text
            else:
                choice.say(choice.reader.push(piece.text))
        if choice.reader is not None and choice.end is not None:
            choice.say(choice.reader.flush())

    def _echo(self, choice: Choice, request: int) -> None:
        """Begin a text with its prompt, once all its views have come."""
        echo, views = self._echoes[request], self._views[request]
        choice.text = echo.text
        choice.parts.append(echo.text)
        if self._has_logprobs:
            ids = self._requests[request].prompt_token_ids
            known = enumerate(zip(ids, echo.pieces, strict=True))
            choice.tokens += [Token(0, token_id, piece, views.get(place)) for place, (token_id, piece) in known]

    @property
    def ends(self) -> list[Finished]:
        """The ends so far."""
        return [choice.end for choice in self._choices if choice.end is not None]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self._requests)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not run, since their pages were cached."""
        return sum(
            len(asked.prompt_token_ids) - num_computed
            for request, num_computed in self._computed.items()
            if not (asked := self._requests[request]).scores_prompt  # all of it ran for its views
        )

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all texts so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def texts(self) -> list[str]:
        """The texts so far."""
        return ["".join(choice.parts) for choice in self._choices]

    def whole(self) -> Object:
        """The answer, once all its texts have ended."""
        choices = [self._described(index, choice, self._content(choice)) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": self._usage()}

    def pieces(self) -> list[bytes]:
        """The news since the last call as JSON, one piece for each text that has any.

        The end of a text comes after the last call, in a piece of its own: OpenAI's client ends the call at it.
        """
        pieces = []
        for index, choice in enumerate(self._choices):
            if choice.calls and choice.end is not None and not choice.is_over:
                end, choice.end = choice.end, None
                pieces.append(self._new_piece(index, choice))
                choice.tell()
                choice.end = end
            if not choice.is_over and choice.has_news:
                pieces.append(self._new_piece(index, choice))
                choice.tell()
        return pieces

    def frame(self, piece: bytes) -> bytes:
        """A piece as a server-sent event."""
        return b"data: %b\n\n" % piece

    def failure(self, refusal: Refusal) -> bytes:
        """The last piece of a stream that fails."""
        return to_json(refusal.as_json())

    def usage_piece(self) -> bytes:
        """The last piece of a stream that includes usage."""
        return to_json(self._piece([], self._usage()))

    def _new_piece(self, index: int, choice: Choice) -> bytes:
        """The new part of a text. Most pieces differ only in the text, so the rest is encoded once."""
        is_special = self._has_logprobs or self._counts_in_pieces or not choice.has_begun or choice.end is not None
        if is_special or choice.calls or (choice.text and choice.reasoning):
            return to_json(self._piece([self._described(index, choice, self._new_content(choice))]))
        is_reasoning = bool(choice.reasoning)
        if is_reasoning not in choice.frames:
            usual = Choice("", _MARK, has_begun=True) if is_reasoning else Choice(_MARK, has_begun=True)
            piece = to_json(self._piece([self._described(index, usual, self._new_content(usual))]))
            before, _, behind = piece.rpartition(to_json(_MARK))
            choice.frames[is_reasoning] = before, behind
        before, behind = choice.frames[is_reasoning]
        return before + to_json(choice.reasoning or choice.text) + behind

    def _piece(self, choices: list[Object], usage: Object | None = None) -> Object:
        if usage is None and self._counts_in_pieces:
            usage = self._counts()
        with_usage = {"usage": usage} if self.includes_usage or self._counts_in_pieces else {}
        return {**self._head, "object": self.piece_kind, "choices": choices, **with_usage}

    def _usage(self) -> Object:
        return {**self._counts(), "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens}}

    def _counts(self) -> Object:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
        }

    def _described(self, index: int, choice: Choice, content: Object) -> Object:
        reason = None if choice.end is None else finish_reason_of(choice.end.finish_reason, choice.num_calls)
        logprobs = self._logprobs(choice) if self._has_logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    @abstractmethod
    def _content(self, choice: Choice) -> Object:
        """The text of a whole answer."""

    @abstractmethod
    def _new_content(self, choice: Choice) -> Object:
        """The text of a piece."""

    @abstractmethod
    def _logprobs(self, choice: Choice) -> Object:
        """The probabilities of the tokens not sent yet."""

    def _shown(self, token_id: int) -> str:
        """A token as a text: part of a character as OpenAI writes it, a special token by name."""
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode() or self._tokenizer.piece(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def _content(self, choice: Choice) -> Object:
        return {"message": message_of(choice.text, choice.reasoning, [*choice.calls.values()])}

    def _new_content(self, choice: Choice) -> Object:
        delta: Object = {} if choice.has_begun else {"role": "assistant", "content": ""}
        if choice.reasoning:
            delta["reasoning_content"] = choice.reasoning
        if choice.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in choice.calls.items()]
        return {"delta": {**delta, "content": choice.text} if choice.text else delta}

    def _usage(self) -> Object:
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    def _logprobs(self, choice: Choice) -> Object:
        content = []
        for view in map(_inspection, choice.tokens):
            likeliest = [self._logprob(item) for item in view.alternatives]
            content.append({**self._logprob(view.chosen), "top_logprobs": likeliest})
        return {"content": content}

    def _logprob(self, item: TokenLogprob) -> Object:
        piece = self._tokenizer.token_bytes(item.token_id)
        return {"token": self._shown(item.token_id), "logprob": _finite(item.logprob), "bytes": list(piece)}


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    prefix = "cmpl"
    whole_kind = "text_completion"
    piece_kind = "text_completion"

    def _content(self, choice: Choice) -> Object:
        return {"text": choice.text}

    def _new_content(self, choice: Choice) -> Object:
        return {"text": choice.text}

    def _logprobs(self, choice: Choice) -> Object:
        views = [token.inspection for token in choice.tokens]  # None for a prompt's first token
        offsets, offset = [], choice.num_told
        for token in choice.tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._shown(token.token_id) for token in choice.tokens],
            "token_logprobs": [None if view is None else _finite(view.chosen.logprob) for view in views],
            "top_logprobs": [None if view is None else self._likeliest(view) for view in views],
            "text_offset": offsets,
        }

    def _likeliest(self, view: Inspection) -> Object:
        """The likeliest tokens by their texts, and the chosen one. A second token of a text is named as in vLLM."""
        chosen = view.chosen
        names = {self._shown(chosen.token_id): chosen.token_id}
        logprobs = {}
        for item in view.alternatives:
            name = self._shown(item.token_id)
            if names.setdefault(name, item.token_id) != item.token_id:
                name = f"token_id:{item.token_id}"
            logprobs[name] = _finite(item.logprob)
        return {**logprobs, self._shown(chosen.token_id): _finite(chosen.logprob)}


def _inspection(token: Token) -> Inspection:
    assert token.inspection is not None
    return token.inspection


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


# `TextsResponse`: runs the texts of one client and sends them, whole or as server-sent events.
#
# When a client leaves or takes too long, its rows are free before the next step. The server's end cancels the response,
# which then informs its client.

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
    """See above. With `is_stream` pieces are sent as they come; while a client reads slowly they are joined.

    `deadline` is the event loop's time at which the answer must have ended, None for no limit.
    """

    service: Service
    requests: Sequence[Request]
    answer: Answer
    is_stream: bool
    deadline: float | None
    grammar: "Grammar | None" = None  # that the texts follow
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
        await send({"type": "http.response.body", "body": self.answer.stream_end, "more_body": False})

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
        body = b"".join(map(self.answer.frame, pieces))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end_stream(self, refusal: Refusal, state: dict[str, Any], send: Send) -> None:
        """Report the end in the stream's last piece, since the status has been sent already."""
        state["status"] = refusal.status
        body = self.answer.frame(self.answer.failure(refusal))
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
