"""A chat whose answers come from a server: the same loop, and the commands that need no model here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.cli import lazy
from llmcli.cli.chat_session.state import Talk
from llmcli.engine.chat_events import AnswerSplitter, ChatEvent, TurnFinished, TurnStarted, split_reasoning
from llmcli.engine.conversation import UNFINISHED, Answer, Conversation
from llmcli.engine.request import FinishReason, Timings
from llmcli.errors import ServerError, UsageError
from llmcli.tool_calls import CallReader, openai_call, split_calls

_REASONS: Mapping[Any, FinishReason] = {"stop": "eos", "length": "length"}
_NO_TIMES = Timings(0, 0.0, 0.0, 0, 0.0)


class RemoteChat:
    """An `Answerer`. `asked` are the keys of every request besides the messages.

    With a seed the next answer to a message has the next seed: a server has no sample indices.
    """

    def __init__(self, client: lazy.server_client.ServerClient, conversation: Conversation, asked: Mapping[str, Any]):
        self.client = client
        self.asked = dict(asked)
        self._conversation = conversation
        self._running: _Running | None = None

    @property
    def conversation(self) -> Conversation:
        """All turns, the answer in progress included."""
        running = self._running
        return self._conversation if running is None else running.said("interrupted")

    @conversation.setter
    def conversation(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def send(self, message: str) -> Iterator[ChatEvent]:
        """Answer a new message. Raises: as `ServerClient`"""
        return self._answer(self._conversation.ask(message), sample=0)

    def report(self, results: Sequence[str]) -> Iterator[ChatEvent]:
        """As `send`. Raises: UsageError for another number of them than calls"""
        return self._answer(self._conversation.report(results), sample=0)

    def edit(self, message: str) -> Iterator[ChatEvent]:
        """Replace the last message and answer it. Raises: UsageError if there is none"""
        return self._answer(self._conversation.without_last().ask(message), sample=0)

    def regenerate(self) -> Iterator[ChatEvent]:
        """Answer the last message again. Raises: UsageError if there is none"""
        last = self._conversation.last.answer
        return self._answer(self._conversation.with_answer(None), sample=0 if last is None else last.sample + 1)

    def interrupt(self) -> list[ChatEvent]:
        """End the answer in progress, which frees its row in the server."""
        running, self._running = self._running, None
        if running is None:
            return []
        running.pieces.close()
        self._conversation = running.said("interrupted")
        return running.finish("interrupted")

    def _answer(self, conversation: Conversation, sample: int) -> Iterator[ChatEvent]:
        body = {**self.asked, "messages": [_as_sent(message) for message in conversation.messages()]}
        if "seed" in body:
            body["seed"] = (body["seed"] + sample) % 2**64
        pieces = iter(self.client.pieces(body))
        reason: FinishReason = "eos"
        for text, finish_reason in pieces:
            if self._running is None:
                names = [tool["function"]["name"] for tool in self.asked.get("tools", ())]
                self._running = _Running(conversation, sample, pieces, names)
                yield TurnStarted((), 0, 0, 0, 0)
            reason = _REASONS.get(finish_reason, reason)
            yield from self._running.push(text)
        if self._running is None:
            raise ServerError(f"{self.client.address} gave no answer")
        running, self._running = self._running, None
        self._conversation = running.said(reason)
        yield from running.finish(reason)


class _Running:
    """An answer while it comes."""

    def __init__(self, conversation: Conversation, sample: int, pieces: Any, names: Sequence[str]):
        self.pieces = pieces
        self._names = names  # of tools
        self._begun = conversation
        self._sample = sample
        self._text = ""
        self._splitter = AnswerSplitter("undecided", self._reader)

    def push(self, text: str) -> list[ChatEvent]:
        """Take more text; return what is final."""
        self._text += text
        return [*self._splitter.push(text)]

    def said(self, reason: FinishReason) -> Conversation:
        """The conversation with the answer as far as it has come."""
        return self._begun.with_answer(self._finished(reason))

    def finish(self, reason: FinishReason) -> list[ChatEvent]:
        """Return what was held back, at the end."""
        return [*self._splitter.flush(), TurnFinished(self._finished(reason), (), _NO_TIMES)]

    def _finished(self, reason: FinishReason) -> Answer:
        reasoning, content = split_reasoning(self._text, "undecided")
        calls: list[dict[str, Any]] = []
        if (reader := self._reader) is not None and reason not in UNFINISHED:
            origin = len(self._begun.turns), self._text, self._sample
            content, found = split_calls(reader, content)
            calls = [openai_call(call, (*origin, number)) for number, call in enumerate(found)]
        return Answer(self._text, content, reasoning, (), reason, self._sample, tuple(calls))

    @property
    def _reader(self) -> CallReader | None:
        return CallReader(lazy.server_client.CALL_FORM, self._names) if self._names else None


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a server, where the arguments of calls are a text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@dataclass(kw_only=True)
class RemoteTalk(Talk):
    """A conversation with a server."""

    chat: RemoteChat

    def facts(self) -> str:
        """As for `Talk`."""
        return f"{self.model} at {self.chat.client.address}"

    def settings(self) -> dict[str, str]:
        """The settings sent to the server; the rest is as the server was started."""
        asked = {name: str(value) for name, value in self.chat.asked.items() if name != "tools"}
        return {**asked, "others": "the server's"}

    def change(self, name: str, value: Any) -> None:
        """As for `Talk`."""
        if name == "overflow":
            raise UsageError("a server decides what happens when the context is full; overflow cannot be set here")
        if name == "max_new_tokens":
            name = "max_tokens"
            self.chat.asked.pop(name, None)
        if value is not None:
            self.chat.asked[name] = value
