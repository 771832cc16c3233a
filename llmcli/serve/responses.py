"""/v1/responses, OpenAI's newer form of an answer: a translation around that of /v1/chat/completions.

Nothing is stored: a request brings its whole conversation, and what names an earlier response is refused.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

import pydantic
from pydantic import Field

from llmcli.differences import refuse_unknown, shown
from llmcli.errors import UsageError
from llmcli.openai_body import IDLE_KEYS, BodyError, IdleKey, drop_idle, read_messages, text_of, unknown_key
from llmcli.schema.constraint import Constraint, constraint_of_format
from llmcli.serve.answers import ChatAnswer, Object
from llmcli.serve.bodies import ChatBody, key_names, refused
from llmcli.serve.refusal import Refusal, to_json
from llmcli.tools import Tools, read_tools

_NOT_STORED = "nothing, as nothing is stored here; send the whole conversation in input"
_NOT_HERE = "nothing, as there is no such thing here"


def _nothing(expected: str) -> IdleKey:
    return IdleKey(expected, lambda value, n: False)


# Of the newer form's keys, those that change no text here; besides those that it shares with the older one.
_SHARED = ("metadata", "user", "safety_identifier", "service_tier", "store", "moderation")
_CACHE = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
_INCLUDED = ["reasoning.encrypted_content"]  # reasoning comes as it is, and can be sent back so
_IDLE: Mapping[str, IdleKey] = {
    **{name: IDLE_KEYS[name] for name in (*_SHARED, *_CACHE, "top_logprobs")},
    "background": IdleKey("false", lambda value, n: value is False),
    "truncation": IdleKey("'disabled'", lambda value, n: value == "disabled"),
    "include": IdleKey(f"some of {_INCLUDED}", lambda value, n: isinstance(value, list) and value in ([], _INCLUDED)),
    "reasoning": IdleKey("an object", lambda value, n: isinstance(value, dict)),
    **{name: _nothing(_NOT_STORED) for name in ("previous_response_id", "conversation", "prompt")},
    **{name: _nothing(_NOT_HERE) for name in ("access_programs", "background_options", "context_management", "image")},
    "max_tool_calls": _nothing("nothing, as tools are called by the client"),
}
_NO_KEYS = {"n", "max_tokens", "logprobs", "top_logprobs", "response_format", "echoed"}  # fields of the body
OWN_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}  # of keys of /v1/chat/completions
_ECHOED_IDLE, _ECHOED = ("metadata", "reasoning", "user"), ("instructions", "text", "tools", "tool_choice")


class ResponsesBody(ChatBody):
    """A body of /v1/responses, with the values of /v1/chat/completions.

    `echoed` are keys that the answer repeats as they came.
    """

    messages: Any = Field(alias="input")
    instructions: Any = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, alias="max_output_tokens")
    text: Any = None
    echoed: Mapping[str, Any] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        with refused(""):
            asked = drop_idle(value, [name for name in key_names(cls) if name not in _NO_KEYS], idle_keys=_IDLE)
            echoed = {name: value[name] for name in _ECHOED_IDLE if value.get(name) is not None}
            echoed |= {name: asked[name] for name in _ECHOED if name in asked}
            if "input" in asked:
                asked["input"] = read_input("input", asked["input"], asked.get("instructions"))
        return {**asked, "echoed": echoed}

    @property
    def offered(self) -> Tools | None:
        """The tools that the answer may call. Raises: Refusal for keys that are not in OpenAI's form"""
        parallel = {"parallel_tool_calls": self.parallel_tool_calls}
        with refused("tools"), _in_own_places():
            return read_tools({"tools": _tools(self.tools), "tool_choice": _choice(self.tool_choice), **parallel})

    @property
    def format_constraint(self) -> Constraint | None:
        """What `text.format` holds the texts to. Raises: Refusal for a bad one"""
        with refused("text"):
            return _format_constraint(self.text)


def _tools(value: Any) -> Any:
    """Tools in the form of /v1/chat/completions."""
    if not isinstance(value, list):
        return value
    tools = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = shown(tool.get("type") if isinstance(tool, dict) else tool)
            raise BodyError(f"{where} is {kind}, expected a tool of type function", where)
        asked = {name: one for name, one in tool.items() if one not in (None, False) or name == "strict"}
        _refuse_unknown(where, asked, _TOOL_KEYS)
        function = {name: asked[name] for name in _TOOL_KEYS[1:] if asked.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _choice(value: Any) -> Any:
    """A tool_choice in the form of /v1/chat/completions."""
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function" or value.keys() - {"type", "name"}:
        expected = "'auto', 'none', 'required', or {\"type\": \"function\", \"name\": ...}"
        raise BodyError(f"tool_choice is {shown(value)}, expected {expected}", "tool_choice")
    return {"type": "function", "function": {"name": value.get("name")}}


@contextmanager
def _in_own_places() -> Iterator[None]:
    """Name the places of errors as this form does. Raises: BodyError"""
    try:
        yield
    except BodyError as error:
        message, key = (re.sub(r"(\.tool_calls\[0\])?\.function\b", "", text) for text in (str(error), error.key))
        raise BodyError(message, key, is_unknown=error.is_unknown) from error


def _format_constraint(text: Any) -> Constraint | None:
    if not isinstance(text, dict | None):
        raise BodyError(f"text is {shown(text)}, expected an object", "text")
    refuse_unknown(text or {}, ("format", "verbosity"), "text.")
    value = (text or {}).get("format")
    if isinstance(value, dict) and value.get("type") == "json_schema":
        refuse_unknown(value, ("type", "name", "description", "schema", "strict"), "text.format.")
        if not isinstance(value.get("schema"), dict):
            raise BodyError(f"text.format.schema is {shown(value.get('schema'))}, expected a JSON Schema", "text")
        value = {"type": "json_schema", "json_schema": {name: one for name, one in value.items() if name != "type"}}
    try:
        constraint = constraint_of_format("text.format", value)
    except UsageError as error:
        raise BodyError(str(error).replace(".json_schema", ""), "text") from error
    return None if constraint is None else replace(constraint, key=constraint.key.replace(".json_schema", ""))


# The input: items become messages, one each, so that errors name the item. Those of one turn of the model are joined.

_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
_ITEMS = "message, function_call, function_call_output or reasoning"
_PARTS = ("input_text", "output_text")
_MESSAGE_KEYS = ("type", "id", "status", "role", "content", "phase")
_CALL_KEYS = ("type", "id", "status", "call_id", "name", "arguments")
_OUTPUT_KEYS = ("type", "id", "status", "call_id", "output")
_REASONING_KEYS = ("type", "id", "status", "summary", "content", "encrypted_content")


def read_input(key: str, value: Any, instructions: Any) -> tuple[dict[str, Any], ...]:
    """The conversation, after the instructions if there are any. Raises: BodyError"""
    before = [] if instructions is None else [{"role": "system", "content": text_of("instructions", instructions)}]
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise BodyError(f"{key} is {shown(value)}, expected a text or a list of items", key)
    converted = [_as_message(f"{key}[{index}]", item) for index, item in enumerate(items)]
    with _in_own_places():
        messages = read_messages(key, converted)
    if before and messages[0]["role"] == "system":  # many templates know one system message
        first = {**messages[0], "content": f"{before[0]['content']}\n\n{messages[0]['content']}"}
        return (first, *_joined(messages[1:]))
    return (*before, *_joined(messages))


def _as_message(where: str, item: Any) -> dict[str, Any]:
    """An item as a message of /v1/chat/completions."""
    if not isinstance(item, dict):
        raise BodyError(f"{where} is {shown(item)}, expected an item", where)
    kind = item.get("type") or "message"
    if kind == "message":
        _refuse_unknown(where, item, _MESSAGE_KEYS)
        if item.get("role") == "tool":
            message = f"{where}.role is 'tool', expected an item of type function_call_output instead"
            raise BodyError(message, f"{where}.role")
        content = {"content": _parts(f"{where}.content", item["content"], _PARTS)} if "content" in item else {}
        return {**({"role": item["role"]} if "role" in item else {}), **content}
    if kind == "reasoning":
        _refuse_unknown(where, item, _REASONING_KEYS)
        parts = _parts(f"{where}.content", item.get("content") or [], ("reasoning_text",))
        if not isinstance(parts, list):
            raise BodyError(f"{where}.content is {shown(parts)}, expected a list of parts", f"{where}.content")
        return {"role": "assistant", "content": "", "reasoning_content": "".join(part["text"] for part in parts)}
    if kind == "function_call":
        _refuse_unknown(where, item, _CALL_KEYS)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": text_of(f"{where}.call_id", item.get("call_id")), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        _refuse_unknown(where, item, _OUTPUT_KEYS)
        output = _parts(f"{where}.output", item.get("output"), _PARTS)
        if not isinstance(output, list):
            text_of(f"{where}.output", output)
        call_id = text_of(f"{where}.call_id", item.get("call_id"))
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind == "item_reference":
        message = f"{where} is an item_reference, and nothing is stored here; send the whole item (store: false)"
        raise BodyError(message, f"{where}.type")
    raise BodyError(f"{where}.type is {shown(kind)}, expected {_ITEMS}", f"{where}.type")


def _refuse_unknown(where: str, item: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in item:
        if name not in known:
            raise unknown_key(name, known, f"{where}.")


def _parts(where: str, value: Any, kinds: Sequence[str]) -> Any:
    """A content in the parts of /v1/chat/completions; a text stays one."""
    if not isinstance(value, list):
        return value
    parts = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = shown(part.get("type") if isinstance(part, dict) else part)
            raise BodyError(f"{place} is {kind}, expected a part of type {' or '.join(kinds)}", place)
        _refuse_unknown(place, part, ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"))
        parts.append({"type": "text", "text": text_of(f"{place}.text", part.get("text"))})
    return parts


def _joined(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, with those of one turn of the model in one: its reasoning, its text and its calls."""
    turn: dict[str, Any] | None = None
    for message in messages:
        is_more = message["role"] == "assistant" and "reasoning_content" not in message
        if turn is not None and is_more and message.get("tool_calls"):
            turn = {**turn, "tool_calls": [*turn.get("tool_calls", ()), *message["tool_calls"]]}
        elif turn is not None and is_more and not turn["content"] and "tool_calls" not in turn:
            turn = {**turn, "content": message["content"]}
        else:
            yield from _turn(turn)
            turn = message if message["role"] == "assistant" else None
            if turn is None:
                yield message
    yield from _turn(turn)


def _turn(message: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A turn of the model; an item of reasoning without a text is none."""
    if message is not None and message.get("reasoning_content") == "":
        message = {name: value for name, value in message.items() if name != "reasoning_content"}
        if not message["content"] and "tool_calls" not in message:
            return
    if message is not None:
        yield message


# The answer: items, and the events of a stream.

_PART_KINDS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesAnswer(ChatAnswer):
    """The answer of /v1/responses: one text, as items."""

    prefix = "resp"
    stream_end = b""

    def __init__(self, *args: Any, body: ResponsesBody, **kwargs: Any):
        """`body` is what was asked."""
        super().__init__(*args, **kwargs)
        self._body = body
        (self._choice,) = self._choices
        self._items: list[Object] = []
        self._said: list[str] | None = None  # of the last item, while it is open
        self._num_events = 0

    def whole(self) -> Object:
        """The answer, once its text has ended."""
        for _ in self._news():
            pass
        return self._response()

    def pieces(self) -> list[bytes]:
        """The news since the last call: events as JSON."""
        choice = self._choice
        return [to_json(event) for event in self._news()] if choice.has_news and not choice.is_over else []

    def frame(self, piece: bytes) -> bytes:
        """An event of the stream, which has its type twice."""
        return b"event: %b\ndata: %b\n\n" % (piece.split(b'"', 4)[3], piece)

    def failure(self, refusal: Refusal) -> bytes:
        """The last event of a stream that fails: programs look for the error in the event, or for its parts."""
        error = refusal.as_json()["error"]
        parts = {name: error[name] for name in ("code", "message", "param")}
        return to_json({**self._event("error", **parts), "error": error})

    def _news(self) -> Iterator[Object]:
        choice = self._choice
        if not choice.has_begun:
            yield self._event("response.created", response=self._response())
            yield self._event("response.in_progress", response=self._response())
        for call in choice.calls.values():
            if "id" not in call:  # more of the last item, before any text
                yield from self._say_arguments(call)
        if choice.reasoning:
            yield from self._say("reasoning", choice.reasoning)
        if choice.text:
            yield from self._say("message", choice.text)
        for call in choice.calls.values():
            if "id" in call:
                yield from self._call(call)
        if choice.end is not None and not choice.is_over:
            if not self._items:
                yield from self._open("message")
            choice.tell()
            yield from self._close()
            response = self._response()
            yield self._event(f"response.{response['status']}", response=response)
        choice.tell()

    def _say(self, kind: str, text: str) -> Iterator[Object]:
        """Add to the last item; begin it if it is another one."""
        if self._said is None or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        assert self._said is not None
        self._said.append(text)
        yield self._part_event("delta", delta=text)

    def _call(self, call: Object) -> Iterator[Object]:
        """Begin a tool call."""
        yield from self._close()
        what: Object = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        self._items.append({"type": "function_call", "id": f"fc_{uuid4().hex}", "status": "in_progress", **what})
        self._said = []
        yield self._item_event("response.output_item.added", item=self._items[-1])
        yield from self._say_arguments(call)

    def _say_arguments(self, call: Object) -> Iterator[Object]:
        """Add to the arguments of the last item, a tool call."""
        if (text := call["function"]["arguments"]) and self._said is not None:
            self._said.append(text)
            item_id = self._items[-1]["id"]
            yield self._item_event("response.function_call_arguments.delta", item_id=item_id, delta=text)

    def _open(self, kind: str) -> Iterator[Object]:
        item: Object = {"type": kind, "id": f"{kind}_{uuid4().hex}", "status": "in_progress", "content": []}
        item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
        self._items.append(item)
        self._said = []
        yield self._item_event("response.output_item.added", item=item)
        yield self._item_event("response.content_part.added", item_id=item["id"], content_index=0, part=self._part())

    def _close(self) -> Iterator[Object]:
        if self._said is None:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            names = {"item_id": item["id"], "name": item["name"]}
            item["arguments"] = "".join(self._said)
            yield self._item_event("response.function_call_arguments.done", **names, arguments=item["arguments"])
        else:
            part = self._part()
            item["content"] = [part]
            yield self._part_event("done", text=part["text"])
            yield self._item_event("response.content_part.done", item_id=item["id"], content_index=0, part=part)
        item["status"] = "incomplete" if self._status() == "incomplete" else "completed"
        self._said = None
        yield self._item_event("response.output_item.done", item=item)

    def _part(self) -> Object:
        """The only part of the last item, so far."""
        kind = self._items[-1]["type"]
        notes: Object = {"annotations": [], "logprobs": []} if kind == "message" else {}
        return {"type": _PART_KINDS[kind], "text": "".join(self._said or ()), **notes}

    def _event(self, kind: str, **keys: Any) -> Object:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **keys}

    def _item_event(self, kind: str, **keys: Any) -> Object:
        return self._event(kind, output_index=len(self._items) - 1, **keys)

    def _part_event(self, what: str, **keys: Any) -> Object:
        item = self._items[-1]
        logprobs: Object = {"logprobs": []} if item["type"] == "message" else {}
        kind = f"response.{_PART_KINDS[item['type']]}.{what}"
        return self._item_event(kind, item_id=item["id"], content_index=0, **keys, **logprobs)

    def _status(self) -> str:
        if self._choice.end is None or not self._choice.is_over:
            return "in_progress"
        return "incomplete" if self._choice.end.finish_reason in ("length", "context") else "completed"

    def _response(self) -> Object:
        """The answer so far; its items are there once it has ended."""
        body, head, status = self._body, self._head, self._status()
        params = self._requests[0].sampler.params
        is_over = self._choice.is_over
        return {
            "id": str(head["id"]).replace("-", "_"),
            "object": "response",
            "created_at": head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": body.max_new_tokens,
            "model": head["model"],
            "output": self._items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "seed": head["seed"],
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **body.echoed,
        }

    def _usage(self) -> Object:
        usage = super()._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
