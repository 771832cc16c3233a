"""`Grammar`: what texts must match, in llguidance's form: made from the user's input, checked and tried.

Refuses what llguidance cannot follow exactly, and what no text matches, in the user's own words.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from llmcli.errors import UsageError
from llmcli.reading import object_of_unique_keys, parse_json
from llmcli.schema.constraint import Constraint
from llmcli.schema.json_schema import CheckedSchema, check_regex
from llmcli.schema.library import MaskLimits, Matcher, Tokens, byte_tokens
from llmcli.schema.tool_lark import (
    Start,
    ToolRules,
    can_be_keyword,
    closed_parameters,
    is_plain_object,
    python_value,
    tools_lark,
)
from llmcli.tokenizer.bounded_process import BoundedProcess
from llmcli.tokenizer.pieces import TokenPieces
from llmcli.tool_calls import named_form

# Converts llama.cpp's GBNF to Lark's syntax, by llguidance; what llguidance converts wrongly is refused.

_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.M)
# Strings, bracket expressions and comments.
_QUOTED_GBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.S)
_CODE = re.compile(r"\\(?:\\|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
# In llguidance's output: a word of the lexer, its name, white space, quoted parts, and repeated parts.
_WORD = re.compile(r"^([A-Z][A-Z0-9_]*):((?:.*\n?)(?:[ \t]+\|.*\n?)*)", re.M)
_NAME = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
_SPACE = re.compile(r"\(?/\[(?: |\\[tnr])+\]/[*+]?\)?")
_QUOTED_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
_REPEATED = re.compile(r"/(\[(?:[^\]\\]|\\.)*\])/([*+])")
_SET_OPERATION = re.compile(r"&&|--|~~")  # in Rust's regular expressions, not in GBNF


def gbnf_as_lark(name: str, text: str) -> str:
    """The same grammar in Lark's syntax. Raises: UsageError with the line"""
    bare = _QUOTED_GBNF.sub(lambda match: "_" + "\n" * match[0].count("\n") + "_" * (len(match[0]) - 1), text)
    for found in _QUOTED_GBNF.finditer(text):
        if found[0].startswith("[") and _SET_OPERATION.search(found[0]):
            raise _refused(name, text, found.start(), f"{found[0]:.40} is read in another way; write && -- ~~ apart")
    if (dot := bare.find(".")) >= 0:
        raise _refused(name, bare, dot, "the dot for any character is not supported; name the characters in brackets")
    spelt = _QUOTED_GBNF.sub(lambda match: _CODE.sub(_character, match[0]), text)
    try:
        lark = gbnf_to_lark(spelt)
    except GbnfToLarkError as error:
        message = str(error).partition(" at line ")[0]
        raise _refused(name, spelt, error.pos.pos, f"{message[:1].lower()}{message[1:]}") from error
    except RecursionError:
        raise UsageError(f"{name}: parentheses are nested too deeply") from None
    except Exception as error:  # names of rules have no exception of their own
        unknown = re.search(r"'([\w-]+)'", str(error))
        place = re.search(rf"(?<![\w-]){re.escape(unknown[1])}(?![\w-])", bare) if unknown else None
        raise _refused(name, text, place.start() if place else 0, str(error) or "it is not a grammar") from error
    return _with_free_space(lark.removeprefix("%llguidance {}\n"))


def _with_free_space(lark: str) -> str:
    """Turn words of white space, and words that contain them, into rules.

    The lexer takes the longest word, which would swallow line ends. Repeated sets in such a rule become words.
    """
    words = {found[1]: found[2] for found in _WORD.finditer(lark)}
    free = {name for name, content in words.items() if _SPACE.fullmatch(content.strip())}
    num_before = -1
    while num_before < len(free):
        num_before = len(free)
        free |= {name for name, content in words.items() if free & set(_NAME.findall(_QUOTED_LARK.sub("", content)))}

    def as_rule(found: re.Match[str]) -> str:
        name, content = found[1], found[2]
        if name in free and not _SPACE.fullmatch(content.strip()):
            content = _REPEATED.sub(lambda part: f"/{part[1]}+/" + ("?" if part[2] == "*" else ""), content)
        return f"{name}:{content}"

    lark = _WORD.sub(as_rule, lark)
    return _lower(lark, free)


def _lower(lark: str, names: set[str]) -> str:
    """The grammar with these words renamed as rules."""
    parts, last = list[str](), 0
    for quoted in [*_QUOTED_LARK.finditer(lark), None]:
        bare = lark[last : quoted.start() if quoted else len(lark)]
        parts.append(_NAME.sub(lambda name: f"free_{name[0].lower()}" if name[0] in names else name[0], bare))
        parts.append(quoted[0] if quoted else "")
        last = quoted.end() if quoted else last
    return "".join(parts)


def _character(code: re.Match[str]) -> str:
    """The character itself: llguidance drops zeros of its code."""
    digits = code[1] or code[2] or code[3]
    if digits is None or int(digits, 16) < 0x80 or int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
        return code[0]
    return chr(int(digits, 16))


def _refused(name: str, text: str, place: int, what: str) -> UsageError:
    line = text.rstrip().count("\n", 0, place) + 1  # a place may be after the last line
    return UsageError(f"{name}, line {line}: {what}")


# Refuses, by line, what llguidance reads in Lark's syntax but we cannot follow.

# Strings, expressions and comments, which are not searched.
_UNREAD = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')
_REFUSED = (
    (re.compile(r"^[ \t]*\??!?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\][ \t]*:", re.M), "a rule's options in brackets are"),
    (re.compile(r"<"), "a special token is"),
    (re.compile(r"%json\b"), "%json is"),
    (re.compile(r"@"), "another grammar is"),
    (re.compile(r"~(?![ \t]*[0-9])"), "~ for all that does not match, even bytes that are not text, is"),
)


def check_lark(name: str, text: str) -> None:
    """Raises: UsageError with the line"""
    bare = _UNREAD.sub(lambda match: "_" * len(match[0]), text)
    for pattern, what in _REFUSED:
        if found := pattern.search(bare):
            line = bare.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip())) + 1
            raise UsageError(f"{name}, line {line}: {what} not supported; write the rule without it")


# Tries a grammar before a model is opened, to refuse what would take too long while a text is written.
#
# With counted repeats, lengths and alternatives, the next token costs llguidance more than their size suggests. So some
# texts are written with a made-up vocabulary, within a fraction of the limits for a real one.

# A real vocabulary, of up to 128,000 tokens, has needed up to four times as much as the made-up one.
_LIMITS = MaskLimits(step_lexer_fuel=800_000, step_max_items=50_000, max_items_in_row=2_000)
_NUM_TOKENS = 4000
_WALKS, _STEPS = 2, 20
_LETTERS = "etaoinshrdlucmwfgypbvkjxqz"
_MARKS = ".,;:!?\"'()[]{}<>/\\|-_=+*&^%$#@~` \n\t"


def trial_error(lark: str) -> str:
    """llguidance's error when it reads the grammar or writes some texts, "" if all is well."""
    if error := Matcher(byte_tokens(), lark, _LIMITS).error:
        return error
    tokens = _tokens()
    begin, mask = Matcher(tokens, lark, _LIMITS), np.zeros(tokens.num_words, np.uint32)
    for seed in range(_WALKS):
        matcher, rng = begin.copy(), random.Random(seed)
        for _ in range(_STEPS):
            if not matcher.fill_mask(mask):
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < tokens.end_id]
            if not len(allowed) or not matcher.consume(int(allowed[rng.randrange(len(allowed))])):
                break
        if matcher.has_error:
            return matcher.error
    return ""


@cache
def _tokens() -> Tokens:
    """Bytes, words, numbers, marks, spaces and letters of many scripts, as in real vocabularies."""
    rng, pieces = random.Random(0), {bytes([byte]): None for byte in range(256)}
    while len(pieces) < _NUM_TOKENS:
        length = min(1 + int(rng.expovariate(0.2)), 16)
        word = "".join(rng.choices(_LETTERS, range(len(_LETTERS), 0, -1), k=length))
        kind = rng.randrange(20)
        if kind < 10:
            word = f" {word}"
        elif kind == 10:
            word = word.upper()
        elif kind < 13:
            word = word.capitalize()
        elif kind == 13:
            word = str(rng.randrange(1000))
        elif kind < 16:
            word = "".join(rng.choices(_MARKS, k=min(length, 4)))
        elif kind == 16:
            word = rng.choice(" \n\t") * rng.randint(2, 40)
        elif kind < 19:
            word = "".join(chr(rng.randrange(0xC0, 0x9FFF)) for _ in range(min(length, 3)))
        pieces[word.encode()] = None
    return Tokens(TokenPieces.from_list([*pieces]))


# `Grammar`: what texts must match, in llguidance's form, made from the user's input.
#
# Refuses what llguidance cannot follow exactly, and what no text matches, in the user's own words.

NO_TOKEN = "NoExtensionBias"  # llguidance's error if neither a token nor the end may follow
_COMPLEX = "it is too complex"
_TOO_COMPLEX = re.compile("fuel exhausted|max is|too many|too complex|Unable to determine if", re.I)

# Without it llguidance allows only the canonical tokens of text that is forced. It comes last, so that the lines of a
# user's grammar keep their numbers.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

# White space in a JSON value: at most one space after a comma or a colon, as json.dumps writes. Without a bound, models
# fill their texts with it.
_LITTLE_SPACE = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_ANY_SPACE = {"whitespace_pattern": r"[ \n\r\t]+"}

# Without \u every string has one form. With it a key could be spelled in a second way, which llguidance takes for a key
# that is not listed. Only control characters without a letter are lost.
_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class Grammar:
    """`name` is the user's name for it, such as `--regex`; `lark` is the grammar for llguidance.

    `notes` list what in a schema has no effect.
    """

    name: str
    lark: str
    notes: tuple[str, ...] = ()


def json_schema_grammar(name: str, text: str, *, any_space: bool = False, is_strict: bool = False) -> Grammar:
    """JSON values that fit a JSON Schema, given as text; `any_space` allows all the white space of JSON.

    `is_strict` refuses unknown keywords and formats.

    Raises: UsageError if it is not a schema, cannot be followed exactly, or fits no value.
    """
    try:
        schema = parse_json(text, object_of_unique_keys)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise UsageError(f"{name} has the lone surrogate U+{code:04X}, half of a character; leave it out") from error
    except ValueError as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from error
    checked = _held_schema(name, schema, any_space=any_space, is_strict=is_strict)
    lark = _json_lark(checked.document(), any_space)
    return Grammar(name, lark, checked.notes)


def any_json_grammar(name: str, *, any_space: bool = False) -> Grammar:
    """Any JSON value."""
    return Grammar(name, _json_lark({}, any_space))


def _held_schema(name: str, schema: Any, *, any_space: bool = False, is_strict: bool = False) -> CheckedSchema:
    """Raises: UsageError if it is not a schema, cannot be followed exactly, or fits no value"""
    checked = CheckedSchema(name, schema, is_strict=is_strict)

    def fault(part: dict[str, Any]) -> str:
        return _fault(_json_lark(part, any_space)) or ""

    if found := checked.find_fault(lambda part: fault(part) != "", lambda part: fault(part).startswith(_COMPLEX)):
        place, part = found
        raise UsageError(f"{name}: {place} cannot be held: {checked.in_users_words(fault(part))}")
    return checked


def regex_grammar(name: str, regex: str) -> Grammar:
    r"""Texts that match a regular expression from end to end; `\d`, `\w` and `\s` are ASCII, as with Python's re.ASCII.

    Raises: UsageError unless Python's `re` and llguidance both read it, and read it alike.
    """
    check_regex(name, regex)
    return _checked(name, f"start: /{llguidance.regex_to_lark(regex, 'dws')}/{_NO_FORCING}")


def choice_grammar(name: str, choices: Sequence[str]) -> Grammar:
    """One of these texts. Raises: UsageError for an empty one"""
    if not all(choices):
        raise UsageError(f"{name} is empty; give it a text")
    # One word of the lexer: at most 2,000 rules may begin at once.
    words = " | ".join(json.dumps(choice) for choice in choices)
    return _checked(name, f"start: CHOICE\nCHOICE: {words}{_NO_FORCING}")


def lark_grammar(name: str, text: str) -> Grammar:
    """Texts of a grammar in llguidance's Lark syntax or llama.cpp's GBNF.

    Raises: UsageError for what llguidance does not read, and for special tokens.
    """
    if _RULE.search(text):
        text = gbnf_as_lark(name, text)
    check_lark(name, text)
    return _checked(name, text + _NO_FORCING)


def tools_grammar(
    name: str,
    form: str,
    tools: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    must_call: bool,
    is_single: bool,
    start: Start,
    text: tuple[str, Any] | None = None,
) -> Grammar:
    """Answers that may call these of the tools, which are functions as OpenAI describes them, given under `name`.

    Arguments fit the schema of their tool. Where it cannot be held, they are any object, and a note says so.
    `text` is the key and the JSON Schema of a text without calls.

    Raises: UsageError for a tool that is `strict` and cannot be held, and for a `text` that cannot
    """
    rules, notes = list[ToolRules](), list[str]()
    for index, tool in enumerate(tools):
        if tool["name"] not in names:
            continue
        place = f"{name}[{index}].function.parameters"
        try:
            checked = _held_schema(place, closed_parameters(tool.get("parameters")))
        except UsageError as error:
            if tool.get("strict"):
                raise
            notes.append(f"{error}; the arguments of {tool['name']} are any object")
            checked = CheckedSchema(place, {"type": "object"})
        notes += checked.notes
        rules.append(_tool_rules(tool["name"], checked))
    rule = None
    if text is not None:
        checked = _held_schema(*text)
        notes += checked.notes
        rule = _json_rule(checked.document())
    lark = tools_lark(named_form(form), rules, must_call=must_call, is_single=is_single, start=start, text=rule)
    if (fault := _fault(lark + _NO_FORCING)) is not None:
        raise UsageError(f"{name}: {fault}")
    return Grammar(name, lark + _NO_FORCING, tuple(notes))


def _tool_rules(name: str, checked: CheckedSchema) -> ToolRules:
    root = checked.document()["$defs"]["0"]
    values = None
    if is_plain_object(root) and all(map(can_be_keyword, root["properties"])):
        values = {
            key: python_value(schema, _json_rule(checked.document(f"#/$defs/0/properties/{key}")))
            for key, schema in root["properties"].items()
        }
    document = checked.document()
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": document["$ref"]}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for key in ("parameters", "arguments")
    ]
    json_call = _json_rule({"anyOf": calls, "$defs": document["$defs"]})
    return ToolRules(name, _json_rule(document), json_call, values, root.get("required", ()))


def grammar_of(constraint: Constraint) -> Grammar:
    """The grammar of a batch line or a request, named by its key. Raises: as the function of its kind"""
    name, value = constraint.key, constraint.value
    if constraint.kind == "schema":
        return json_schema_grammar(name, json.dumps(value))
    if constraint.kind == "regex":
        return regex_grammar(name, value)
    if constraint.kind == "choice":
        return choice_grammar(name, value)
    if constraint.kind == "grammar":
        return lark_grammar(name, value)
    if constraint.kind == "tools":
        return tools_grammar(name, **value)
    return any_json_grammar(name)


def first_line(message: str) -> str:
    """llguidance's message, without backtraces and states."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    of_regex = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*of_regex, *lines, "no reason given"][0][:300]


def _json_lark(schema: dict[str, Any], any_space: bool) -> str:
    return f"start: {_json_rule(schema, any_space)}{_NO_FORCING}"


def _json_rule(schema: dict[str, Any], any_space: bool = False) -> str:
    options = {**(_ANY_SPACE if any_space else _LITTLE_SPACE), "json_allowed_escapes": _ESCAPES}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _checked(name: str, lark: str) -> Grammar:
    """Raises: UsageError if llguidance does not read it, no text matches it, or it is too complex"""
    if (fault := _fault(lark)) is not None:
        raise UsageError(f"{name}: {fault}")
    return Grammar(name, lark)


def _fault(lark: str) -> str | None:
    """What is wrong with a grammar; None if llguidance reads it and can write texts."""
    if not (error := trial_error(lark)):
        return None
    line = first_line(error)
    if line == NO_TOKEN or "Regex is empty" in line:
        return "no text fits"
    line = line.partition("JSON schema: ")[2] or line
    if _TOO_COMPLEX.search(line):
        return f"{_COMPLEX}, give one with smaller counts and lengths, or fewer alternatives ({line:.120})"
    return line


# `GrammarProcess`: reads grammars and schemas of strangers, within bounds on time and memory.
#
# A few keywords, such as several `multipleOf`, can make an automaton of millions of states. So a child process reads it
# first.

LIMIT_SECONDS = 5.0  # a schema of a thousand properties takes 0.4 s, 128 tools take 2 s
_MOST_AT_ONCE = 32  # tools in that time


class GrammarProcess:
    """See above. The process starts with the first request."""

    def __init__(self) -> None:
        self._process = BoundedProcess(
            "llmcli.schema.grammar_sandbox", "llguidance", "the schema", "give a simpler schema"
        )

    def grammar(self, constraint: Constraint) -> Grammar:
        """Read the grammar. Raises: as `grammar_of`; TokenizerError if it takes too much time or memory"""
        num_tools = len(constraint.value["tools"]) if constraint.kind == "tools" else 0
        answer = self._process.ask(asdict(constraint), LIMIT_SECONDS * (1 + num_tools // _MOST_AT_ONCE))
        if isinstance(answer, str):
            raise UsageError(answer)
        return Grammar(answer["name"], answer["lark"], tuple(answer["notes"]))
