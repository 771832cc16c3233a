"""What `serve` and `batch` share of OpenAI's bodies: messages, keys that change no text here, why a text ends.

Requests for anything unsupported are refused by name, in one short sentence.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from llmcli.differences import shown
from llmcli.errors import UsageError
from llmcli.reading import parse_json

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
ROLES = ("system", "developer", "user", "assistant", "tool")

_MOST_COMPARED = 40  # characters of an unknown key that may be a typing error
_PARTS = '{"type": "text", "text": "Hi"}'


class BodyError(UsageError):
    """A fault of a body; `key` is the place, such as `messages[0].role`."""

    def __init__(self, message: str, key: str, *, is_unknown: bool = False):
        super().__init__(message)
        self.key = key
        self.is_unknown = is_unknown


def unknown_key(key: str, known: Collection[str], where: str = "") -> BodyError:
    """The refusal of an unknown key, with the known one that was probably meant."""
    near = get_close_matches(key, known, n=1) if len(key) <= _MOST_COMPARED else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return BodyError(f"{shown(where + key)} is not supported{hint}", where + key, is_unknown=True)


@dataclass(frozen=True)
class IdleKey:
    """A key of OpenAI's, and its values that ask for nothing.

    `is_idle` gets the value and the number of texts requested.
    """

    expected: str
    is_idle: Callable[[Any, Any], bool]


def _key(expected: str, *values: Any) -> IdleKey:
    """A key that may have one of these values."""
    return IdleKey(expected, lambda value, n: any(type(value) is type(one) and value == one for one in values))


def _of(kind: type, expected: str) -> IdleKey:
    """A key that may have any value of a type, as it changes no text."""
    return IdleKey(expected, lambda value, n: type(value) is kind)


_NO_TOOLS = "as no tools are called here"
IDLE_KEYS: Mapping[str, IdleKey] = {
    # What OpenAI stores of a request, charges for it, and looks for in it
    "metadata": _of(dict, "an object"),
    "user": _of(str, "a string"),
    "safety_identifier": _of(str, "a string"),
    "prompt_cache_key": _of(str, "a string"),
    "prompt_cache_retention": _of(str, "a string"),
    "prompt_cache_options": _of(dict, "an object"),
    "prediction": _of(dict, "an object"),  # it makes the same text come sooner
    "service_tier": _key("'auto' or 'default'", "auto", "default"),
    "store": _key("false, as nothing is stored here", False),
    "moderation": _key("nothing, as no text is judged here"),
    # Settings of models that were trained for them
    "reasoning_effort": _of(str, "a string"),
    "verbosity": _of(str, "a string"),
    # Tools
    "tools": _key(f"an empty list, {_NO_TOOLS}", []),
    "functions": _key("an empty list; tools has OpenAI's newer form", []),
    "tool_choice": _key(f"'none' or 'auto', {_NO_TOOLS}", "none", "auto"),
    "function_call": _key("'none' or 'auto'; tool_choice is OpenAI's newer form", "none", "auto"),
    "parallel_tool_calls": _of(bool, "true or false"),
    "web_search_options": _key("nothing, as nothing is searched here"),
    # Other kinds of answers
    "modalities": _key("['text']", ["text"]),
    "audio": _key("nothing, as answers are texts"),
    "suffix": _key("an empty string, as texts have no given end", ""),
    "best_of": IdleKey("the value of n", lambda value, n: type(value) is int and value == n),
    "echo": _key("false", False),
    "logprobs": _key("false", False),
    "top_logprobs": _key("0", 0),
    "stream": _key("false", False),
    "stream_options": _key("nothing"),
}


def drop_idle(
    body: Mapping[str, Any], known: Collection[str], where: str = "", idle_keys: Mapping[str, IdleKey] = IDLE_KEYS
) -> dict[str, Any]:
    """A body's `known` keys. A null counts as a key that is not given.

    A top_p of 0 becomes a temperature of 0, as both leave only the likeliest token.
    Raises: BodyError for other keys, unless they ask for nothing
    """
    asked: dict[str, Any] = {}
    for key, value in body.items():
        if key in known:
            if value is not None:
                asked[key] = value
            continue
        idle = idle_keys.get(key)
        if idle is None:
            raise unknown_key(key, [*known, *idle_keys], where)
        number = body.get("n")
        if value is not None and not idle.is_idle(value, 1 if number is None else number):
            raise BodyError(f"{where}{key} is {shown(value)}, expected {idle.expected}", where + key)
    if asked.get("top_p") == 0 and not isinstance(asked["top_p"], bool):
        del asked["top_p"]
        asked["temperature"] = 0
    return asked


def finish_reason_of(reason: str, num_calls: int) -> str | None:
    """OpenAI's word for why a text with so many tool calls ends; None if something broke it off."""
    word = _FINISH_REASONS.get(reason)
    return "tool_calls" if num_calls and word == "stop" else word


def message_of(content: str, reasoning: str | None, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The message of an answer, with the reasoning before it and the tool calls after it, if any."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


# Keys of a message besides role and content. Answers that are sent back have nearly all of them.
_MESSAGE_KEYS: Mapping[str, IdleKey] = {
    "refusal": _key("null"),
    "audio": _key("null"),
    "function_call": _key("null; tool_calls has OpenAI's newer form"),
    "annotations": _key("an empty list", []),
    "parsed": IdleKey("anything", lambda value, n: True),  # what OpenAI's client makes of the content
}
_OPTIONAL = ("name", "reasoning_content", "tool_call_id")
_KNOWN_MESSAGE_KEYS = ("role", "content", *_OPTIONAL, "tool_calls")
_CALL = '{"id": "a1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'


def read_messages(key: str, value: Any, roles: Collection[str] | None = ROLES) -> tuple[dict[str, Any], ...]:
    """A conversation for chat templates: messages with `role`, `content`, and what they have of `_OPTIONAL`.

    A message with `tool_calls` may lack a content. Their arguments become the objects that templates expect. A
    content may be a list of parts, which must be texts. The role `developer` is OpenAI's newer word for `system`.
    Without `roles` the chat template decides which roles exist.
    Raises: BodyError for anything else
    """
    if not isinstance(value, list) or not value:
        raise BodyError(f'{key} is {shown(value)}, expected a list such as [{{"role": "user", "content": "Hi"}}]', key)
    return tuple(_message(f"{key}[{index}]", message, roles) for index, message in enumerate(value))


def _message(where: str, message: Any, roles: Collection[str] | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BodyError(f"{where} is {shown(message)}, expected an object with role and content", where)
    calls = read_calls(f"{where}.tool_calls", message.get("tool_calls"))
    for name in ("role",) if calls else ("role", "content"):
        if name not in message:
            raise BodyError(f"{where} has no {name}, expected role and content", f"{where}.{name}")
    role = text_of(f"{where}.role", message["role"])
    if roles is not None and role not in roles:
        raise BodyError(f"{where}.role is {shown(role)}, expected {' or '.join(roles)}", f"{where}.role")
    for name, expected in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if roles is not None and message.get(name) and role != expected:
            key = f"{where}.{name}"
            raise BodyError(f"{key} is {shown(message[name])}, expected it in messages of {expected} alone", key)
    asked = {name: item for name, item in message.items() if name not in _MESSAGE_KEYS}
    for name, idle in _MESSAGE_KEYS.items():
        if (item := message.get(name)) is not None and not idle.is_idle(item, 1):
            raise BodyError(f"{where}.{name} is {shown(item)}, expected {idle.expected}", f"{where}.{name}")
    for name in asked:
        if name not in _KNOWN_MESSAGE_KEYS:
            raise unknown_key(name, (*_KNOWN_MESSAGE_KEYS, *_MESSAGE_KEYS), f"{where}.")
    content = "" if calls and message.get("content") is None else _content(f"{where}.content", message["content"])
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    optional = [name for name in _OPTIONAL if message.get(name) is not None]
    read |= {name: text_of(f"{where}.{name}", message[name]) for name in optional}
    return {**read, "tool_calls": calls} if calls else read


def read_calls(key: str, value: Any) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, for chat templates. Raises: BodyError for anything else"""
    if value is not None and not isinstance(value, list):
        raise BodyError(f"{key} is {shown(value)}, expected a list such as [{_CALL}]", key)
    return [_call(f"{key}[{index}]", call) for index, call in enumerate(value or ())]


def _call(where: str, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object.

    `index`, of a stream's pieces, and `parsed_arguments`, of OpenAI's client, are left out.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BodyError(f"{where} is {shown(call)}, expected a call such as {_CALL}", where)
    for given, known, place in (
        (call, ("id", "type", "function", "index"), f"{where}."),
        (function, ("name", "arguments", "parsed_arguments"), f"{where}.function."),
    ):
        if unknown := [name for name in given if name not in known]:
            raise unknown_key(unknown[0], known, place)
    key, arguments = f"{where}.function.arguments", function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError as error:
            raise BodyError(
                f"{key} is {shown(function['arguments'])}, which is not valid JSON: {error}", key
            ) from error
    if not isinstance(arguments, dict):
        raise BodyError(f"{key} is {shown(arguments)}, expected a JSON object in a string", key)
    named = {"name": text_of(f"{where}.function.name", function.get("name")), "arguments": arguments}
    id_ = {} if call.get("id") is None else {"id": text_of(f"{where}.id", call["id"])}
    return {**id_, "type": "function", "function": named}


def _content(key: str, value: Any) -> str:
    if not isinstance(value, list):
        return text_of(key, value, f"a string, or a list of parts such as {_PARTS}")
    return "".join(_part(f"{key}[{index}]", part) for index, part in enumerate(value))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
        raise BodyError(f"{where} is {shown(part)}, expected a part such as {_PARTS}", where)
    for name in part:
        if name not in ("type", "text", "prompt_cache_breakpoint"):
            raise unknown_key(name, ("type", "text"), f"{where}.")
    return text_of(f"{where}.text", part["text"])


def read_template_kwargs(key: str, value: Any) -> dict[str, Any]:
    """Variables for the chat template, such as `enable_thinking`. Raises: BodyError unless they are an object"""
    if not isinstance(value, dict):
        raise BodyError(f'{key} is {shown(value)}, expected an object such as {{"enable_thinking": false}}', key)
    return value


def text_of(key: str, value: Any, expected: str = "a string") -> str:
    """The value, which must be a string."""
    if not isinstance(value, str):
        raise BodyError(f"{key} is {shown(value)}, expected {expected}", key)
    return value
