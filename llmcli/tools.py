"""What a request says of tools, in OpenAI's keys: those that it offers, and whether one must be called."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.differences import shown
from llmcli.openai_body import BodyError, text_of, unknown_key

TOOL_KEYS = ("tools", "tool_choice", "parallel_tool_calls")
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'
_CHOICES = '\'auto\', \'none\', \'required\', or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class Tools:
    """Tools as chat templates get them, and which of them may be called; with `must_call` the answer is a call."""

    tools: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    must_call: bool = False
    is_parallel: bool = True


def read_tools(body: Mapping[str, Any], where: str = "") -> Tools | None:
    """The tools that a body offers; None if it has none, or wants no call.

    Raises: BodyError for anything that is not in OpenAI's form
    """
    given, choice, parallel = (body.get(key) for key in TOOL_KEYS)
    if parallel is not None and not isinstance(parallel, bool):
        key = f"{where}parallel_tool_calls"
        raise BodyError(f"{key} is {shown(parallel)}, expected true or false", key)
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            key = f"{where}tool_choice"
            raise BodyError(f"{key} is {shown(choice)}, and there are no tools; give some in tools", key)
        return None
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        expected = f"a list of at most {MAX_TOOLS} tools such as {_TOOL}"
        raise BodyError(f"{where}tools is {shown(given)}, expected {expected}", f"{where}tools")
    tools = tuple(_tool(f"{where}tools[{index}]", tool) for index, tool in enumerate(given))
    names = tuple(tool["function"]["name"] for tool in tools)
    for index, name in enumerate(names):
        if name in names[:index]:
            key = f"{where}tools[{index}].function.name"
            raise BodyError(f"{key} is {shown(name)} a second time; give each tool its own name", key)
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return Tools(tools, names, choice == "required", parallel is not False)
    return Tools(tools, (_chosen(f"{where}tool_choice", choice, names),), True, parallel is not False)


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    """A tool; keys of the function that are not OpenAI's are for the chat template."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise BodyError(f"{where} is {shown(tool)}, expected a tool such as {_TOOL}", where)
    for key in tool:
        if key not in ("type", "function"):
            raise unknown_key(key, ("type", "function"), f"{where}.")
    name = text_of(f"{where}.function.name", function.get("name"))
    if not _NAME.fullmatch(name):
        key = f"{where}.function.name"
        raise BodyError(f"{key} is {shown(name)}, expected 1 to 128 letters, digits, underscores, dots and dashes", key)
    for key, kind, expected in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON Schema of objects"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(value := function.get(key), kind | None):
            place = f"{where}.function.{key}"
            raise BodyError(f"{place} is {shown(value)}, expected {expected}", place)
    types = (function.get("parameters") or {}).get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        place = f"{where}.function.parameters.type"
        raise BodyError(f"{place} is {shown(types)}, expected 'object'", place)
    return {**tool}


def _chosen(key: str, choice: Any, names: tuple[str, ...]) -> str:
    """The name of the tool to call."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BodyError(f"{key} is {shown(choice)}, expected {_CHOICES}", key)
    if name not in names:
        raise BodyError(f"{key} names {shown(name)}, expected one of {', '.join(names)}"[:500], key)
    return name
