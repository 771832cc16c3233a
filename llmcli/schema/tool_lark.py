"""The grammar of answers that may call tools, in Lark's syntax, made of a form's spellings.

Until a call begins any text may come. From then on only the call, with arguments that its tool takes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmcli.schema.keywords import HELD
from llmcli.tool_calls import NAME, Form, Spelling, parts_of

Start = Literal["answer", "undecided", "reasoning"]

_SPACE = r"[ \t\r\n]{0,8}"  # without a bound, models fill their texts with it
_ANY = "(?s:.*)"
_OPENING, _CLOSING = "<think>", r"<\/think>"
_IDENTIFIER = re.compile(r"[^\W\d]\w*", re.ASCII)
_PYTHON = {"boolean": "/True|False|true|false/", "null": "/None|null/"}


@dataclass(frozen=True)
class ToolRules:
    """What one tool takes.

    `json` is the rule of its arguments as an object, `json_call` that of a whole call in JSON. `values` has the
    rules of single arguments, of which those in `required` must come; None if they cannot be held one by one: then `**`
    unpacks the object.
    """

    name: str
    json: str
    json_call: str
    values: Mapping[str, str] | None
    required: Sequence[str] = ()


def python_value(schema: Any, rule: str) -> str:
    """The rule of a value in Python's syntax, given that of its JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return _PYTHON.get(kind[0] if isinstance(kind, list) and len(kind) == 1 else str(kind), rule)


def can_be_keyword(name: str) -> bool:
    """Whether Python can name an argument so."""
    return _IDENTIFIER.fullmatch(name) is not None


def is_plain_object(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says of objects only which keys they have, and what each holds."""
    held = set(schema) & HELD - {"$defs", "definitions"}
    is_plain = {"properties"} <= held <= {"type", "properties", "required", "additionalProperties"}
    return is_plain and set(schema.get("required", ())) <= set(schema["properties"])


def closed_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, an object. A function takes no others than those it lists."""
    if parameters is None:
        parameters = {"properties": {}}
    closed = {"additionalProperties": False} if is_plain_object(parameters) else {}
    return {**closed, **parameters, "type": "object"}


def tools_lark(
    form: Form, tools: Sequence[ToolRules], *, must_call: bool, is_single: bool, start: Start, text: str | None = None
) -> str:
    """The grammar. With `must_call` the answer is calls in the form's first spelling.

    With `is_single` there is one call. `start` says whether reasoning comes first: it may, or has begun already.
    `text` is the rule of a text without calls, in JSON. Then an answer is calls alone, as with `must_call`, or such a
    text.
    """
    text = None if must_call else text
    lines = _Lines(form, tools, is_single).all(only_calls=must_call or text is not None, start=start, text=text)
    return "\n".join(lines)


class _Lines:
    """The rules of one grammar."""

    def __init__(self, form: Form, tools: Sequence[ToolRules], is_single: bool):
        self._form = form
        self._tools = tools
        self._is_single = is_single

    def all(self, *, only_calls: bool, start: Start, text: str | None) -> Iterator[str]:
        spellings = self._form.spellings[:1] if only_calls else self._form.spellings
        numbered = list(enumerate(spellings))
        marked = [number for number, spelling in numbered if spelling.mark]
        bodies = [f"calls_{number}" for number, spelling in numbered if not spelling.mark]
        if marked and only_calls:
            mark, more = _escaped(spellings[0].mark), self._repeated(spellings[0], 0)
            bodies.append(f"/{_SPACE}/ (/{mark}/ calls_0{more}{'' if text is None else ' | text'})")
        elif marked:
            bodies.append("marked_text marked")
        elif (
            text is not None
        ):  # calls of the text's lexemes: llguidance does not go back where a text goes on otherwise
            is_json = spellings[0].arguments == "json"
            calls = " | ".join(tool.json_call for tool in self._tools) if is_json else "calls_0"
            bodies = [f"/{_SPACE}/ ({calls} | text)"]
        bodies += [] if only_calls else ["TEXT"]
        # What begins a text, and so cannot begin one without calls
        begins = [rf"{_SPACE}{_OPENING}"] if start == "undecided" else []
        begins += [_begin_of(spelling, self._tools) for spelling in spellings if not spelling.mark]
        not_begun = "".join(f" & ~/{begin}{_ANY}/" for begin in begins)
        marks = "|".join({_escaped(spelling.mark) for spelling in spellings if spelling.mark})

        thinking = {"answer": "", "undecided": "thinking? ", "reasoning": "thinking "}[start]
        yield f"start: {thinking}body{'' if start == 'answer' or only_calls else ' | THOUGHT'}"
        if start != "answer":
            opened = rf"{_SPACE}{_OPENING}" if start == "undecided" else ""
            yield rf"thinking[lazy]: /{opened}{_ANY}{_CLOSING}/"
            if not only_calls:
                yield rf"THOUGHT: /{opened}{_ANY}/ & ~/{_ANY}{_CLOSING}{_ANY}/"
        yield f"body: {' | '.join(bodies)}"
        if text is not None:
            yield f"text: {text}"
        if not only_calls:
            not_marked = f" & ~/{_ANY}({marks}){_ANY}/" if marks else ""
            yield f"TEXT: /{_ANY}/{not_marked}{not_begun}"
        if marked and not only_calls:
            yield "marked_text[lazy]: MARKED_TEXT"
            yield f"MARKED_TEXT: /{_ANY}({marks})/{not_begun}"
            rests = (f"calls_{number}{self._repeated(spellings[number], number)}" for number in marked)
            yield f"marked: {' | '.join(rests)}"
        for number, spelling in numbered:
            yield from self._calls(number, spelling, splits=text is not None)
        yield from self._arguments({spelling.arguments for spelling in spellings})

    def _repeated(self, spelling: Spelling, number: int) -> str:
        """More calls with all their parts."""
        is_last = self._is_single or spelling.joint
        return "" if is_last else f" (/{_spaced([spelling.mark])}/ calls_{number})*"

    def _calls(self, number: int, spelling: Spelling, *, splits: bool) -> Iterator[str]:
        """The calls of a spelling, after its mark. With `splits` an opening without a mark is a lexeme of its own."""
        takes = [f"takes_{number}_{index}" for index in range(len(self._tools))]
        first = self._heads(spelling, spelling.opening, takes)
        if splits and not spelling.mark and spelling.opening:
            first = f"/{_escaped(spelling.opening)}/ ({self._heads(spelling, '', takes)})"
        closing = f" /{_spaced(parts_of(spelling.closing))}/" if spelling.closing else ""
        more = "" if self._is_single or not spelling.joint else f" more_{number}*"
        yield f"calls_{number}: ({first}){more}{closing}"
        if more:
            yield f"more_{number}: {self._heads(spelling, spelling.joint, takes)}"
        tail = f" /{_spaced(parts_of(spelling.tail))}/" if spelling.tail else ""
        for index, take in enumerate(takes):
            yield f"{take}: {spelling.arguments}_{index}{tail}"

    def _heads(self, spelling: Spelling, before: str, takes: Sequence[str]) -> str:
        """The head of each tool's call after the text `before`, and what it takes, as alternatives."""
        space = _SPACE if spelling.arguments == "json" else ""
        calls = []
        for tool, take in zip(self._tools, takes, strict=True):
            heads = "|".join(_spaced(parts_of(f"{before} {head}", tool.name)) for head in spelling.heads)
            calls.append(f"/(?:{heads}){space}/ {take}")
        return " | ".join(calls)

    def _arguments(self, kinds: set[str]) -> Iterator[str]:
        for index, tool in enumerate(self._tools):
            yield f"json_{index}: {tool.json}"
            if "keywords" in kinds:
                yield from _keywords(index, tool)


def _keywords(index: int, tool: ToolRules) -> Iterator[str]:
    """The rules of a tool's arguments in Python's syntax, in their order, those that are not required perhaps left out.

    `keywords_I_N` is what may come from argument N on, `keywords_I_N_more` the same after another argument.
    """
    if tool.values is None:
        yield f'keywords_{index}: "**" json_{index}'
        return
    names = list(tool.values)
    yield f"keywords_{index}: keywords_{index}_0"
    for place, name in enumerate(names):
        yield f"value_{index}_{place}: {tool.values[name]}"
        for more, comma in (("", ""), ("_more", f",{_SPACE}")):
            rest = f"/{comma}{name}={_SPACE}/ value_{index}_{place} keywords_{index}_{place + 1}_more"
            skipped = "" if name in tool.required else f" | keywords_{index}_{place + 1}{more}"
            yield f"keywords_{index}_{place}{more}: {rest}{skipped}"
    for more in ("", "_more"):
        yield f'keywords_{index}_{len(names)}{more}: ""'


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _spaced(parts: Sequence[str]) -> str:
    """An expression for the parts, each after white space that may be there."""
    return "".join(f"{_SPACE}{_escaped(part)}" for part in parts)


def _begin_of(spelling: Spelling, tools: Sequence[ToolRules]) -> str:
    """An expression for what begins a call without a mark."""
    names = f"(?:{'|'.join(_escaped(tool.name) for tool in tools)})"
    heads = []
    for head in spelling.heads:
        parts = parts_of(f"{spelling.opening} {head}", NAME)
        if spelling.arguments == "json":  # the rest follows the name
            parts = parts[: next(place for place, part in enumerate(parts) if NAME in part) + 1]
        heads.append(_spaced(parts).replace(NAME, names))
    return f"(?:{'|'.join(heads)})"
