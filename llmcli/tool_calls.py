"""Tool calls: how each family of models writes them, as declarations; and the reader that finds them in a text.

All that is known of a family stands in `FORMS`. What holds calls to the schemas of their tools is made of the same
declarations, in `schema/tool_lark.py`.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

# How calls are written. In these texts a space stands for white space that may be there, and NAME for a tool's name.

NAME = "NAME"


@dataclass(frozen=True)
class Spelling:
    """One way to write calls: mark, opening, head, arguments, tail, closing.

    With a `mark` calls may come anywhere in a text, and have begun once it is there. Without one they come at a text's
    start alone, and have begun once a tool's name is there. Further calls follow a `joint`, with head, arguments and
    tail; without a joint each has all parts. Arguments are a JSON object, or Python's `a=1, b="x"` or `**{"a": 1}`.
    """

    heads: tuple[str, ...]
    tail: str = ""
    mark: str = ""
    opening: str = ""
    closing: str = ""
    joint: str = ""
    arguments: Literal["json", "keywords"] = "json"

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of its texts."""
        return parts_of(" ".join((self.mark, self.opening, *self.heads, self.joint, self.tail, self.closing)))


@dataclass(frozen=True)
class Form:
    """The spellings of a family. Its chat templates have one of the `signs`, and none of `other_signs`.

    Calls that must come have the first spelling.
    """

    name: str
    signs: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    other_signs: tuple[str, ...] = ()


_ARGUMENTS = ('{ "name" : "NAME" , "arguments" :',)
_PARAMETERS = tuple(
    f'{{ {kind} "name" : "NAME" , "{key}" :'
    for key in ("parameters", "arguments")
    for kind in ("", '"type" : "function" ,')
)
_PYTHONIC = Spelling(("NAME (",), ")", opening="[", closing="]", joint=",", arguments="keywords")

FORMS = (
    Form("mistral-args", ("[ARGS]",), (Spelling(("NAME [ARGS]",), mark="[TOOL_CALLS]"),)),
    Form("mistral", ("[TOOL_CALLS]",), (Spelling(_ARGUMENTS, "}", "[TOOL_CALLS]", "[", "]", ","),)),
    Form(
        "hermes",
        ("<tool_call>",),
        (Spelling(_ARGUMENTS, "}", "<tool_call>", closing="</tool_call>"),),
        other_signs=("<function=", "<arg_key>"),
    ),
    Form(
        "llama",
        ("<|python_tag|>", '"parameters": dictionary'),
        (
            Spelling(_PARAMETERS, "}", joint=";"),
            Spelling(_PARAMETERS, "}", "<|python_tag|>", joint=";"),
            Spelling(("NAME . call (",), ")", "<|python_tag|>", joint=";", arguments="keywords"),
            _PYTHONIC,
        ),
    ),
    Form("pythonic", ("[func_name1(",), (_PYTHONIC,)),
    Form(
        "json",
        ("arguments", '"parameters"'),
        (Spelling(_PARAMETERS, "}"), Spelling(_PARAMETERS, "}", opening="[", closing="]", joint=",")),
        other_signs=("<tool_call>", "<｜tool"),
    ),
)

SINGLE_SIGN = "only supports single tool-calls"  # of templates that refuse several calls in a message


def form_of(template: str) -> Form | None:
    """The form that a chat template shows; None if it shows none of these."""
    for form in FORMS:
        if any(sign in template for sign in form.signs) and not any(sign in template for sign in form.other_signs):
            return form
    return None


def named_form(name: str) -> Form:
    """The form of that name."""
    return next(form for form in FORMS if form.name == name)


def parts_of(text: str, name: str = "") -> tuple[str, ...]:
    """The parts of a spelling's text, between which white space may stand, with a tool's name."""
    return tuple(part.replace(NAME, name) for part in text.split())


# The reader: splits a text into content and calls, as it comes.


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The next call has begun: it calls the tool of that name."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the latest call's arguments, as JSON."""

    text: str


Said = Content | CallBegun | CallArguments


@dataclass
class Call:
    """A call: the tool's name, and the JSON of its arguments, which ends early if the text was cut."""

    name: str
    arguments: str = ""


class _Head(NamedTuple):
    """The parts of a text that begins a call of `name`."""

    spelling: Spelling
    parts: tuple[str, ...]
    name: str


class _Found(NamedTuple):
    """The head of a call, and the place in the text where its arguments begin."""

    head: _Head
    end: int


_MOST_SPACE = 64  # between two parts: a text of spaces alone would be held back for ever
_MORE = -1  # instead of a place: more of the text must come first


@lru_cache(maxsize=256)  # each of many texts has a reader
def _heads(spelling: Spelling, before: str, names: tuple[str, ...]) -> tuple[_Head, ...]:
    """The heads of that spelling, each after the text `before`."""
    return tuple(_Head(spelling, parts_of(f"{before} {head}", name), name) for head in spelling.heads for name in names)


class CallReader:
    """Finds calls of tools in a text. Holds back what may still become one.

    White space beside a call belongs to nobody. What is said depends on the text alone, not on how it was cut.
    """

    def __init__(self, form: Form, names: Sequence[str]):
        self._names = tuple(names)
        self._heads = [
            head
            for spelling in form.spellings
            for head in _heads(spelling, f"{spelling.mark} {spelling.opening}", self._names)
        ]
        self._marks = {spelling.mark for spelling in form.spellings if spelling.mark}
        self._begins = re.compile("|".join({re.escape(mark[0]) for mark in self._marks}) or "(?!)")
        self._spelling = form.spellings[0]  # of the latest call
        self._arguments: _Arguments | None = None  # of the call that goes on
        self._is_between = False  # after a call's arguments, before the end of the calls or the next one
        self._is_after = False  # after calls, with nothing but white space since
        self._is_at_start = True
        self._has_calls = False
        self._held = ""

    def push(self, text: str) -> list[Said]:
        """Take more text; return what is certain."""
        self._held += text
        said: list[Said] = []
        while self._held and (more := self._next()) is not None:
            said += more
        return said

    def flush(self) -> list[Said]:
        """What was held back, at the end of the text. A call that was cut stays so."""
        held, self._held = self._held, ""
        is_content = held and self._arguments is None and not self._is_between
        return [Content(held)] if is_content and (held.strip() or not self._has_calls) else []

    def _next(self) -> list[Said] | None:
        """Take some of the text held back; None if more must come first."""
        if self._arguments is not None:
            return self._take_arguments(self._arguments)
        return self._end_call() if self._is_between else self._search()

    def _take_arguments(self, arguments: "_Arguments") -> list[Said]:
        written, count = arguments.take(self._held)
        self._held = self._held[count:]
        if arguments.is_over:
            self._arguments, self._is_between = None, True
        return [CallArguments(written)] if written else []

    def _end_call(self) -> list[Said] | None:
        """Take the text between two calls, or after the last."""
        spelling = self._spelling
        before = f"{spelling.tail} {spelling.joint}"
        found = self._match(_heads(spelling, before, self._names) if spelling.joint else (), 0)
        if isinstance(found, _Found):
            return self._begin(found, 0)
        end = _end_of(parts_of(f"{spelling.tail} {spelling.closing}"), self._held, 0)
        if found == _MORE or end == _MORE:
            return None
        self._held = self._held[end or 0 :]
        self._is_between, self._is_after = False, True
        return []

    def _search(self) -> list[Said] | None:
        """Take content up to a call, or to what may become one."""
        if self._is_after:
            self._held = self._held.lstrip()
            self._is_after = not self._held
        for place in self._places():
            is_first = self._is_at_start and not self._held[:place].strip()
            found = self._match([head for head in self._heads if is_first or head.spelling.mark], place)
            if isinstance(found, _Found):
                return self._begin(found, place)
            if found == _MORE:
                return self._take_content(place) or None
        return self._take_content(len(self._held)) or None

    def _places(self) -> Iterator[int]:
        """Where a call may begin: at the text's start, or at a mark."""
        first = len(self._held) - len(self._held.lstrip())
        if self._is_at_start and first < len(self._held):
            yield first
        for found in self._begins.finditer(self._held):
            place = found.start()
            if any(mark.startswith(self._held[place : place + len(mark)]) for mark in self._marks):
                yield place

    def _take_content(self, end: int) -> list[Said]:
        """Content up to that place, without white space at its end: a call may follow."""
        text = self._held[:end].rstrip()
        if not text:
            return []
        self._held, self._is_at_start = self._held[len(text) :], False
        return [Content(text)]

    def _begin(self, found: _Found, place: int) -> list[Said]:
        """Begin the call found at that place, after the content before it."""
        before = "" if self._is_between else self._held[:place].rstrip()
        self._held = self._held[found.end :]
        self._spelling = found.head.spelling
        self._arguments = _JsonObject() if self._spelling.arguments == "json" else _Keywords()
        self._is_between = self._is_at_start = False
        self._has_calls = True
        begun: list[Said] = [CallBegun(found.head.name)]
        return [Content(before), *begun] if before else begun

    def _match(self, heads: Iterable[_Head], place: int) -> _Found | int | None:
        """The first of these that stands at that place; `_MORE` if one may, None if none can."""
        result: int | None = None
        for head in heads:
            end = _end_of(head.parts, self._held, place)
            if end is not None and end != _MORE:
                end = _checked(head.spelling, self._held, end)
                if end is not None and end != _MORE:
                    return _Found(head, end)
            result = _MORE if end == _MORE else result
        return result


def _end_of(parts: Iterable[str], text: str, place: int) -> int | None:
    """Where these parts end, if they stand at that place; `_MORE` if the text ends before them, None if they do not."""
    for part in parts:
        begin = place
        while place < len(text) and text[place].isspace() and place - begin <= _MOST_SPACE:
            place += 1
        if not text.startswith(part, place):
            return _MORE if part.startswith(text[place:]) else None
        place += len(part)
    return place


_KEYWORD = re.compile(r"\s*(?:\)|\*\*|[^\W\d]\w*\s*=)")
_OPEN_KEYWORD = re.compile(r"\s*(?:\*|[^\W\d]\w*\s*)?")


def _checked(spelling: Spelling, text: str, place: int) -> int | None:
    """Where arguments begin, as `_end_of`: a head without them begins no call."""
    if spelling.arguments == "json":
        end = _end_of(("{",), text, place)
        return end if end is None or end == _MORE else end - 1
    if _KEYWORD.match(text, place):
        return place
    return _MORE if _OPEN_KEYWORD.fullmatch(text, place) else None


class _JsonObject:
    """The text of a JSON object, as it is, to its end."""

    _PLAIN, _QUOTED = re.compile(r'["{}\[\]]'), re.compile(r'"|\\')

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._is_quoted = self._is_escaped = False

    def take(self, text: str) -> tuple[str, int]:
        """The JSON that the text adds, and how many of its characters belong to it."""
        place = 0
        if self._is_escaped and text:
            self._is_escaped, place = False, 1
        while not self.is_over and (found := (self._QUOTED if self._is_quoted else self._PLAIN).search(text, place)):
            place = found.end()
            if found[0] == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif found[0] == '"':
                self._is_quoted = not self._is_quoted
            else:
                self._depth += 1 if found[0] in "{[" else -1
                self.is_over = self._depth == 0
        count = place if self.is_over else len(text)
        return text[:count], count


class _Keywords:
    """Python's `a=1, b="x"`, up to a closing parenthesis, as a JSON object; an argument at a time."""

    def __init__(self) -> None:
        self.is_over = False
        self._argument = ""  # so far
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._has_arguments = False

    def take(self, text: str) -> tuple[str, int]:
        """The JSON that the text adds, and how many of its characters belong to it."""
        written = ""
        for place, character in enumerate(text):
            is_end = not self._quote and self._depth == 0 and character in ",)"
            if is_end:
                written += self._as_json()
                if character == ")":
                    self.is_over = True
                    return written + ("}" if self._has_arguments else "{}"), place
                continue
            self._argument += character
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            else:
                self._depth += (character in "([{") - (character in ")]}")
        return written, len(text)

    def _as_json(self) -> str:
        """The argument that has ended, "" for none."""
        argument, self._argument = self._argument.strip(), ""
        name, _, value = argument.partition("=")
        if argument.startswith("**"):
            written = _json_of(argument.removeprefix("**").strip())[1:-1].strip()
        else:
            written = f"{json.dumps(name.strip())}: {_json_of(value.strip())}" if argument else ""
        if not written:
            return ""
        before, self._has_arguments = ", " if self._has_arguments else "{", True
        return before + written


_Arguments = _JsonObject | _Keywords


def _json_of(value: str) -> str:
    """The JSON of a value in JSON or Python; other text as a string."""
    try:
        json.loads(value, parse_constant=_refuse)
    except ValueError:
        pass
    else:
        return value
    try:
        return json.dumps(ast.literal_eval(value), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(value)


def _refuse(constant: str) -> None:
    """Raises: ValueError: NaN and Infinity are no JSON"""
    raise ValueError(constant)


def split_calls(reader: CallReader, text: str) -> tuple[str, list[Call]]:
    """The content and the calls of a whole text."""
    content, calls = "", list[Call]()
    for said in [*reader.push(text), *reader.flush()]:
        if isinstance(said, Content):
            content += said.text
        elif isinstance(said, CallBegun):
            calls.append(Call(said.name))
        else:
            calls[-1].arguments += said.text
    return content, calls


def openai_call(call: Call, origin: tuple[object, ...]) -> dict[str, Any]:
    """A call in OpenAI's form. The same `origin` gives it the same id.

    Mistral's templates take ids of nine letters and digits, and no others.
    """
    call_id = hashlib.sha256(repr(origin).encode()).hexdigest()[:9]
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
