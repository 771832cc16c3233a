"""OpenAI's forms of an answer: whole, or in the pieces of a stream. Pure functions of events.

Besides OpenAI's keys each object has `seed`, which gives the same texts again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from llmcli.engine.events import Finished, PromptScored, Token
from llmcli.engine.request import Request
from llmcli.openai_body import FINISH_REASONS
from llmcli.sampling.inspect import Inspection, TokenLogprob
from llmcli.serve.json_text import to_json
from llmcli.tokenizer.base import Tokenizer

Object = dict[str, Any]

_MARK = "\0"  # stands for a text; no later part of a piece can hold it
_LEAST_LOGPROB = -9999.0  # OpenAI's number for what JSON cannot express


@dataclass
class Choice:
    """One text: what has not been sent yet, all of it so far, and its end once that has come."""

    text: str = ""
    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    tokens: list[Token] = field(default_factory=list)
    num_told: int = 0  # characters
    has_begun: bool = False
    end: Finished | None = None
    is_over: bool = False  # its end has been sent
    frame: tuple[bytes, bytes] | None = None  # a usual piece's JSON before and after its text, once known

    def tell(self) -> None:
        """Mark everything so far as sent."""
        self.num_told += len(self.text)
        self.text, self.tokens = "", []
        self.has_begun, self.is_over = True, self.end is not None


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

    def __init__(
        self,
        model: str,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        includes_usage: bool = False,
        counts_in_pieces: bool = False,
        echoes: Sequence[Echo] = (),
    ):
        """With `counts_in_pieces` each piece of a stream has the numbers of tokens so far. `echoes` by request."""
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
        self._choices = [Choice() for _ in range(self._samples * len(requests))]
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
            choice.text += event.text
            choice.parts.append(event.text)
            choice.num_tokens += 1
            is_end = event.token_id in self._requests[request].sampler.eos_token_ids
            if self._has_logprobs and (self._echoes or not is_end):  # scores of a prompt include the last token
                choice.tokens.append(event)
        else:
            choice.text += event.tail
            choice.parts.append(event.tail)
            choice.end = event
            self._computed[request] = event.timings.prefill_tokens

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
        """The news since the last call as JSON, one piece for each text that has any."""
        pieces = []
        for index, choice in enumerate(self._choices):
            if not choice.is_over and (choice.text or choice.tokens or choice.end is not None):
                pieces.append(self._new_piece(index, choice))
                choice.tell()
        return pieces

    def usage_piece(self) -> bytes:
        """The last piece of a stream that includes usage."""
        return to_json(self._piece([], self._usage()))

    def _new_piece(self, index: int, choice: Choice) -> bytes:
        """The new part of a text. Most pieces differ only in the text, so the rest is encoded once."""
        if self._has_logprobs or self._counts_in_pieces or not choice.has_begun or choice.end is not None:
            return to_json(self._piece([self._described(index, choice, self._new_content(choice))]))
        if choice.frame is None:
            usual = Choice(_MARK, has_begun=True)
            piece = to_json(self._piece([self._described(index, usual, self._new_content(usual))]))
            before, _, behind = piece.rpartition(to_json(_MARK))
            choice.frame = before, behind
        before, behind = choice.frame
        return before + to_json(choice.text) + behind

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
        reason = None if choice.end is None else FINISH_REASONS.get(choice.end.finish_reason)
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
        return {"message": {"role": "assistant", "content": choice.text}}

    def _new_content(self, choice: Choice) -> Object:
        delta: Object = {} if choice.has_begun else {"role": "assistant", "content": ""}
        return {"delta": {**delta, "content": choice.text} if choice.text else delta}

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
