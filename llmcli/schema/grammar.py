"""`Grammar`: what a text is held to, as llguidance reads it, made from what the user gave.

Refuses what llguidance cannot hold exactly, and what no text can fit, by the user's own words for it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from llmcli.errors import UsageError
from llmcli.reading import object_of_unique_keys, parse_json
from llmcli.schema.gbnf import gbnf_as_lark, is_gbnf
from llmcli.schema.held_to import HeldTo
from llmcli.schema.json_schema import CheckedSchema
from llmcli.schema.lark import check_lark
from llmcli.schema.regex import check_regex
from llmcli.schema.trial import trial_error

NO_TOKEN = "NoExtensionBias"  # llguidance's error where no token may follow, nor the end
_COMPLEX = "it is too complex"
_TOO_COMPLEX = re.compile("fuel exhausted|max is|too many|too complex|Unable to determine if", re.I)

# Without it llguidance lets a model choose only the canonical tokens of what must come next. At the end, so that the
# lines of a user's grammar keep their numbers.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

# White space in a JSON value. Models fill their texts with it where nothing bounds it, so there is what json.dumps
# writes or nothing: one space behind a comma or a colon.
_LITTLE_SPACE = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_ANY_SPACE = {"whitespace_pattern": r"[ \n\r\t]+"}

# Without \u every string has one form. With it a key could be written in a second one, which llguidance takes for a
# key that is not listed. Lost are only control characters that have no letter.
_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class Grammar:
    """`name` is what the user knows it by, such as `--regex`; `lark` is the grammar for llguidance.

    `notes` say what of a schema binds nothing.
    """

    name: str
    lark: str
    notes: tuple[str, ...] = ()


def json_schema_grammar(name: str, text: str, *, any_space: bool = False, is_strict: bool = False) -> Grammar:
    """JSON values that fit a JSON Schema, in its text form; `any_space` allows all the white space of JSON.

    `is_strict` refuses keywords and formats that nobody knows.

    Raises: UsageError for what is no schema, for one that cannot be held exactly or that no value fits.
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
    checked = CheckedSchema(name, schema, is_strict=is_strict)
    lark = _json_lark(checked.document(), any_space)

    def fault(part: dict[str, Any]) -> str:
        return _fault(_json_lark(part, any_space)) or ""

    if found := checked.find_fault(lambda part: fault(part) != "", lambda part: fault(part).startswith(_COMPLEX)):
        place, part = found
        raise UsageError(f"{name}: {place} cannot be held: {checked.in_users_words(fault(part))}")
    return Grammar(name, lark, checked.notes)


def any_json_grammar(name: str, *, any_space: bool = False) -> Grammar:
    """Any JSON value."""
    return Grammar(name, _json_lark({}, any_space))


def regex_grammar(name: str, regex: str) -> Grammar:
    r"""Texts that match a regular expression from end to end; `\d`, `\w` and `\s` are ASCII, as with Python's re.ASCII.

    Raises: UsageError for one that Python's `re` and llguidance do not both read, or read alike.
    """
    check_regex(name, regex)
    return _checked(name, f"start: /{llguidance.regex_to_lark(regex, 'dws')}/{_NO_FORCING}")


def choice_grammar(name: str, choices: Sequence[str]) -> Grammar:
    """One of some texts, none of them empty. Raises: UsageError for an empty one"""
    if not all(choices):
        raise UsageError(f"{name} is empty; give it a text")
    # One word of the lexer: as rules no more than 2,000 may begin at once.
    words = " | ".join(json.dumps(choice) for choice in choices)
    return _checked(name, f"start: CHOICE\nCHOICE: {words}{_NO_FORCING}")


def lark_grammar(name: str, text: str) -> Grammar:
    """Texts of a grammar in Lark's syntax, as llguidance has it, or in llama.cpp's GBNF.

    Raises: UsageError for what it does not read, and for special tokens.
    """
    if is_gbnf(text):
        text = gbnf_as_lark(name, text)
    check_lark(name, text)
    return _checked(name, text + _NO_FORCING)


def grammar_of(held_to: HeldTo) -> Grammar:
    """The grammar that a line or a request asks for, by its key's name. Raises: as the function of its kind"""
    name, value = held_to.key, held_to.value
    if held_to.kind == "schema":
        return json_schema_grammar(name, json.dumps(value))
    if held_to.kind == "regex":
        return regex_grammar(name, value)
    if held_to.kind == "choice":
        return choice_grammar(name, value)
    if held_to.kind == "grammar":
        return lark_grammar(name, value)
    return any_json_grammar(name)


def first_line(message: str) -> str:
    """What llguidance says, without the backtraces and states behind it."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    of_regex = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*of_regex, *lines, "no reason given"][0][:300]


def _json_lark(schema: dict[str, Any], any_space: bool) -> str:
    options = {**(_ANY_SPACE if any_space else _LITTLE_SPACE), "json_allowed_escapes": _ESCAPES}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}{_NO_FORCING}"


def _checked(name: str, lark: str) -> Grammar:
    """Raises: UsageError for what llguidance does not read, and what no text fits or is too complex"""
    if (fault := _fault(lark)) is not None:
        raise UsageError(f"{name}: {fault}")
    return Grammar(name, lark)


def _fault(lark: str) -> str | None:
    """What is wrong with a grammar, None if llguidance reads it and texts can be written."""
    if not (error := trial_error(lark)):
        return None
    line = first_line(error)
    if line == NO_TOKEN or "Regex is empty" in line:
        return "no text fits"
    line = line.partition("JSON schema: ")[2] or line
    if _TOO_COMPLEX.search(line):
        return f"{_COMPLEX}, give one with smaller counts and lengths, or fewer alternatives ({line:.120})"
    return line
