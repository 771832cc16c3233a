"""Conversations: as values without a model, and as JSON files that people can read."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from llmcli.engine.request import FinishReason
from llmcli.errors import UsageError
from llmcli.openai_body import read_calls
from llmcli.reading import CONVERSATION
from llmcli.writing import OutputFile

# A conversation as a value: what was said, and the token ids of the answers. It knows no model and no file.

# The reasons after which an answer may continue: the model had not ended it.
UNFINISHED: tuple[FinishReason, ...] = ("length", "context", "interrupted")


@dataclass(frozen=True)
class Answer:
    """What the model said in one turn.

    `text` is all it generated except the end of the turn; `content` is the answer, the end of that text; `reasoning`
    is what came before, None without reasoning. `token_ids` are those of `text`. `sample` is the sample index of the
    draws.
    """

    text: str
    content: str
    reasoning: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    sample: int
    calls: tuple[dict[str, Any], ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """Whether it may continue."""
        return self.finish_reason in UNFINISHED

    @property
    def shown(self) -> str:
        """The answer for people, with a line for each call."""
        functions = [call["function"] for call in self.calls]
        calls = [f"{function['name']}({function['arguments']})" for function in functions]
        return "\n".join([self.content, *calls] if self.content else calls)


@dataclass(frozen=True)
class Turn:
    """A message of the user and its answer, None if there is none yet.

    With `results` the message is the results of the calls in the answer before.
    """

    user: str
    answer: Answer | None = None
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A system prompt and turns. The model no longer sees the first `num_dropped` turns; people still do."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()
    num_dropped: int = 0

    @property
    def seen_turns(self) -> tuple[Turn, ...]:
        """The turns that the model sees."""
        return self.turns[self.num_dropped :]

    @property
    def waiting_calls(self) -> tuple[dict[str, Any], ...]:
        """The calls of the last answer, whose results come next."""
        answer = self.turns[-1].answer if self.turns else None
        return () if answer is None else answer.calls

    @property
    def droppable(self) -> range:
        """How many turns may be dropped: the last message stays, and results stay with the calls before them."""
        starts = [number for number, turn in enumerate(self.turns) if not turn.results]
        return range(self.num_dropped + 1, starts[-1] + 1 if starts else 0)

    @property
    def last(self) -> Turn:
        """The last turn. Raises: UsageError if there is none."""
        if not self.turns:
            raise UsageError("no turn yet; send a message first")
        return self.turns[-1]

    def ask(self, message: str) -> "Conversation":
        """Add a message without an answer."""
        return replace(self, turns=(*self.turns, Turn(message)))

    def report(self, results: Sequence[str]) -> "Conversation":
        """Add the results of the waiting calls, without an answer. Raises: UsageError for another number of them"""
        if len(results) != len(self.waiting_calls):
            raise UsageError(f"there are {len(self.waiting_calls)} calls, and {len(results)} results")
        return replace(self, turns=(*self.turns, Turn("\n".join(results), results=tuple(results))))

    def with_answer(self, answer: Answer | None) -> "Conversation":
        """Replace the answer to the last message, or remove it. Raises: UsageError if there is no turn."""
        return replace(self, turns=(*self.turns[:-1], replace(self.last, answer=answer)))

    def without_last(self) -> "Conversation":
        """Remove the last turn. Raises: UsageError if there is none."""
        if not self.turns:
            raise UsageError("no turn to remove")
        turns = self.turns[:-1]
        return replace(self, turns=turns, num_dropped=min(self.num_dropped, len(turns)))

    def messages(self) -> list[dict[str, Any]]:
        """What the model sees, in the form of chat templates; a last turn without an answer ends in the message."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        calls: tuple[dict[str, Any], ...] = ()
        for turn in self.seen_turns:
            if turn.results:
                told = zip(calls, turn.results, strict=True)
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call, result in told]
            else:
                messages.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                message: dict[str, Any] = {"role": "assistant", "content": turn.answer.content}
                if turn.answer.reasoning is not None:
                    message["reasoning_content"] = turn.answer.reasoning
                if calls := turn.answer.calls:
                    message["tool_calls"] = read_calls("calls", list(calls))
                messages.append(message)
        return messages


# Conversations as JSON files that people can read. Refuses to replace or load any other file.

FORMAT = "llmcli conversation"
VERSION = 1
MAX_TOKEN_ID = 2**31 - 1  # the range of the tokenizer libraries

_MARK = re.compile(rb'"format"\s*:\s*"llmcli conversation"')
CONVERSATION_FILE = OutputFile(
    "a saved conversation",
    lambda head: _MARK.search(head) is not None,
    "replace it with /save --force FILE, or name another file",
    mode=0o600,
)
_MARKDOWN_START = b"<!-- llmcli conversation -->"
_MARKDOWN_FILE = replace(CONVERSATION_FILE, is_own=lambda head: head.startswith(_MARKDOWN_START))


@dataclass(frozen=True)
class SavedConversation:
    """A conversation, with its model and adapters as the command line named them."""

    model: str
    conversation: Conversation
    adapters: tuple[str, ...] = ()


def save_conversation(path: Path, saved: SavedConversation, *, replace: bool) -> None:
    """Write a file that only its owner can read. A kill at any moment leaves the old file or the new one.

    Raises: UsageError for a path that cannot be written, holds anything but a saved conversation, or, unless
    `replace`, exists; OutputError if the disk is full or fails.
    """
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "model": saved.model}
    if saved.adapters:
        content["adapters"] = list(saved.adapters)
    conversation = saved.conversation
    content |= {"system": conversation.system, "num_dropped": conversation.num_dropped}
    content["turns"] = [
        {"user": turn.user}
        | ({"results": list(turn.results)} if turn.results else {})
        | {"answer": None if turn.answer is None else _answer_json(turn.answer)}
        for turn in conversation.turns
    ]
    text = json.dumps(content, ensure_ascii=False, indent=2)
    # Put each list of ids on one line: JSON strings hold no line breaks, so only lists of numbers match.
    text = re.sub(r"\[\n\s*(\d[\d,\s]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    # Not strict: a model's path may hold bytes that are not UTF-8. Such a model must be named again.
    CONVERSATION_FILE.write(path, f"{text}\n".encode(errors="replace"), replace=replace)


def save_markdown(path: Path, saved: SavedConversation, *, replace: bool) -> None:
    """Write the conversation as Markdown, for people; it cannot be loaded. Reasoning is left out.

    Raises: as `save_conversation`; a file may replace another that this function wrote
    """
    conversation = saved.conversation
    parts = [_MARKDOWN_START.decode(), f"# Chat with {saved.model}"]
    if conversation.system is not None:
        parts += ["## System", conversation.system]
    for turn in conversation.turns:
        parts += ["## User", turn.user]
        if turn.answer is not None:
            parts += ["## Assistant", turn.answer.shown]
    text = "\n\n".join(part.strip() for part in parts)
    _MARKDOWN_FILE.write(path, f"{text}\n".encode(errors="replace"), replace=replace)


def load_conversation(path: Path) -> SavedConversation:
    """Read a saved conversation.

    Raises: UsageError if the file cannot be read, is not a saved conversation, or has an unknown version.
    """
    content = CONVERSATION.read_json_object(path)
    if content.get("format") != FORMAT:
        raise UsageError(f'{path} is not a saved conversation: it lacks the line "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {content.get('version')!r:.60} of the format, "
            f"but this llmcli reads version {VERSION}; use the llmcli that wrote it"
        )
    try:
        model = _take(content, "model", str)
        adapters = _take(content, "adapters", list) if "adapters" in content else []
        if not all(isinstance(adapter, str) for adapter in adapters):
            raise _MalformedError("adapters holds something other than names")
        for key, names in (("model", [model]), ("adapters", adapters)):
            if any("\0" in name for name in names):
                raise _MalformedError(f"{key} holds a NUL character, expected a folder or a hub id")
        return SavedConversation(model, _conversation(content), tuple(adapters))
    except _MalformedError as error:
        raise UsageError(f"{path} is not a saved conversation: {error}") from error


class _MalformedError(Exception):
    """The file is malformed; the text says what it has and what is expected."""


def _answer_json(answer: Answer) -> dict[str, Any]:
    values: dict[str, Any] = {"content": answer.content}
    if answer.reasoning is not None:
        values["reasoning"] = answer.reasoning
    if answer.calls:
        values["calls"] = list(answer.calls)
    if answer.text != answer.content:
        values["text"] = answer.text
    return values | {
        "finish_reason": answer.finish_reason,
        "sample": answer.sample,
        "token_ids": list(answer.token_ids),
    }


def _conversation(content: dict[str, Any]) -> Conversation:
    system = None if content.get("system") is None else _take(content, "system", str)
    turns = tuple(_turn(turn, number) for number, turn in enumerate(_take(content, "turns", list), start=1))
    for number, (before, turn) in enumerate(zip((Turn(""), *turns), turns, strict=False), start=1):
        num_calls = len(before.answer.calls) if before.answer else 0
        if turn.results and len(turn.results) != num_calls:
            raise _MalformedError(f"turn {number}: {len(turn.results)} results, expected those of {num_calls} calls")
    num_dropped = _take(content, "num_dropped", int)
    if not 0 <= num_dropped <= len(turns):
        raise _MalformedError(f"num_dropped is {num_dropped}, expected 0 to {len(turns)}")
    return Conversation(system, turns, num_dropped)


def _turn(turn: Any, number: int) -> Turn:
    where = f"turn {number}: "
    if not isinstance(turn, dict):
        raise _MalformedError(f"{where}expected an object")
    answer = turn.get("answer")
    if answer is not None and not isinstance(answer, dict):
        raise _MalformedError(f"{where}answer is not an object")
    results = _take(turn, "results", list, where) if "results" in turn else []
    if not all(isinstance(result, str) for result in results):
        raise _MalformedError(f"{where}results holds something other than texts")
    return Turn(_take(turn, "user", str, where), None if answer is None else _answer(answer, where), tuple(results))


def _answer(values: dict[str, Any], where: str) -> Answer:
    content = _take(values, "content", str, where)
    reasoning = None if values.get("reasoning") is None else _take(values, "reasoning", str, where)
    text = _take(values, "text", str, where) if "text" in values or reasoning is not None else content
    calls = _calls(values, where)
    token_ids = _take(values, "token_ids", list, where)
    finish_reason = _take(values, "finish_reason", str, where)
    sample = _take(values, "sample", int, where)
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in token_ids):
        raise _MalformedError(f"{where}token_ids holds something other than token ids")
    if finish_reason not in get_args(FinishReason):
        raise _MalformedError(
            f"{where}finish_reason is {finish_reason!r:.60}, expected one of {', '.join(get_args(FinishReason))}"
        )
    if not (calls or text.endswith(content)):
        raise _MalformedError(f"{where}text does not end with content")
    if not 0 <= sample < 2**32:
        raise _MalformedError(f"{where}sample is {sample}, expected 0 to 2^32 - 1")
    return Answer(text, content, reasoning, tuple(token_ids), finish_reason, sample, calls)


def _calls(values: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """The calls of an answer, as `Answer` has them."""
    try:
        read = read_calls("calls", values.get("calls"))
        if not all("id" in call for call in read):
            raise UsageError("calls holds one without an id")
    except UsageError as error:
        raise _MalformedError(f"{where}{error}") from error
    return tuple(values.get("calls") or ())


def _take(values: dict[str, Any], key: str, kind: type, where: str = "") -> Any:
    value = values.get(key)
    if type(value) is not kind:
        found = "missing" if key not in values else f"{value!r:.60}"
        raise _MalformedError(f"{where}{key} is {found}, expected {'an' if kind is int else 'a'} {kind.__name__}")
    return value
