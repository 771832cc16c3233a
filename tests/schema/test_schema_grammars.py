"""A stranger's grammar is read in a child process, its texts go on to their end, and GBNF becomes Lark."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from gbnf_grammars import GBNF
from held_walks import accepts, awkward_tokenizer, awkward_vocabulary, extend, walk

from llmcli.errors import LLMCliError, TokenizerError, UsageError
from llmcli.schema import grammar as grammar_process
from llmcli.schema.constraint import Constraint
from llmcli.schema.grammar import Grammar, GrammarProcess, grammar_of, json_schema_grammar, lark_grammar, regex_grammar
from llmcli.schema.schema import Schema


@pytest.fixture(scope="module")
def process() -> GrammarProcess:
    return GrammarProcess()


def read(how: Callable[[Constraint], Grammar], constraint: Constraint) -> Grammar | str:
    """The grammar, or the reason for none."""
    try:
        return how(constraint)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        ("schema", {"uniqueItems": True}),
        ("json_output", True),
        ("regex", "[a-z]+"),
        ("regex", "(?=a)"),
        ("choice", ["yes", "no"]),
        ("choice", [""]),
        ("grammar", 'start: "a"'),
        ("grammar", "start: <|end|>"),
    ],
)
def test_it_reads_what_is_read_here(process: GrammarProcess, kind: Any, value: Any) -> None:
    constraint = Constraint(kind, f"the {kind}", value)
    assert read(process.grammar, constraint) == read(grammar_of, constraint)


def test_what_has_no_end_is_refused_and_others_are_read(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automaton of 7 * 11 * 13 * 17 * 19 * 23 states."""
    schema = {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    monkeypatch.setattr(grammar_process, "LIMIT_SECONDS", 0.5)
    start_time = time.monotonic()
    with pytest.raises(TokenizerError, match=r"the schema failed: it does not end within 0.5 s; give a simpler"):
        process.grammar(Constraint("schema", "schema", schema))
    assert time.monotonic() - start_time < 5
    monkeypatch.undo()
    assert process.grammar(Constraint("regex", "regex", "a")).name == "regex"


def test_a_text_that_is_no_unicode_is_refused(process: GrammarProcess) -> None:
    with pytest.raises(LLMCliError, match=r"^choice: .*hex escape"):
        process.grammar(Constraint("choice", "choice", ["\ud800"]))


# An accepted schema never fails in the middle of a text: it is refused before, or every text can continue.


WORDS = r"^(?:\S+\s+){0,199}\S+$"


def text_schema(**more: object) -> Grammar:
    return json_schema_grammar("--schema", json.dumps({"type": "string", **more}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: text_schema(pattern=WORDS, maxLength=2000),
        lambda: text_schema(pattern=r"^(.*,){20}.*$", maxLength=300),
        lambda: text_schema(allOf=[{"pattern": f"{pair[0]}.*{pair[1]}"} for pair in ("ab", "cd", "ef", "gh")]),
        lambda: regex_grammar("--regex", r"(\w{1,20}\s?){1,200}"),
        lambda: regex_grammar("--regex", r"(.*[a-m].{60}x)+"),
        lambda: lark_grammar("--grammar", "start: x{1,50}\nx: /[a-z]{1,9}/ | /[a-z ]{1,9}/ | /[ -~]{1,9}/\n"),
        lambda: lark_grammar("--grammar", 'start: e\ne: e? e? e? e? "x" e? e?\n'),
    ],
)
def test_a_text_goes_on(make: object) -> None:
    """All of these end within llguidance's own limits."""
    schema, tokenizer = Schema(make(), awkward_vocabulary()), awkward_tokenizer()
    for seed in range(2):
        walk(schema, tokenizer, seed, 60)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: text_schema(pattern=WORDS, maxLength=20000), "# cannot be held: "),
        (lambda: text_schema(pattern=r"^.*[a-m].{30}$", maxLength=1000), "# cannot be held: "),
        (lambda: regex_grammar("--regex", r"((.{0,50}[a-m].{0,50}){0,20}x){1,20}"), ""),
        (lambda: lark_grammar("--grammar", 'start: e\ne: e e | e e e | "x" | /[a-z]/ | "("e")"\n'), ""),
    ],
)
def test_what_takes_too_long_is_refused_before(make: object, place: str) -> None:
    with pytest.raises(UsageError, match=f": {place}it is too complex, give one with smaller counts and lengths"):
        make()


def test_an_expression_deep_in_a_schema_is_tried() -> None:
    """Random texts seldom reach a late property."""
    inner = {"type": "string", "pattern": WORDS, "maxLength": 20000}
    properties = {**{f"field_{index}": {"type": "string"} for index in range(30)}, "last": {"items": inner}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    with pytest.raises(UsageError, match="^schema: #/properties/last/items cannot be held: it is too complex"):
        json_schema_grammar("schema", json.dumps(schema))


# Grammars in GBNF: what they allow, and refusals by line.


ARITHMETIC = """# numbers and brackets
root ::= expr "=" ws term "\\n"
expr ::= term ([-+*/] term)*
term ::= [0-9]{1,3} | "(" ws expr ")" ws
ws ::= [ \\t]*
"""


@pytest.mark.parametrize(
    ("grammar", "whole", "others"),
    [
        (ARITHMETIC, ["1=1\n", "(12+3)*4= 60\n", "( 1/2) -3=0\n"], ["1=", "=1\n", "1234=1\n"]),
        ('root ::= "a" [^"\\\\/x]+ (digit{2} | "yes")?\ndigit ::= [0-9]', ["ab", "a\n"], ["a", 'a"', "a/", "ax"]),
        ('root ::= [\\x41-\\x43\\u00e9] "/" "\\\\" "\\t"', ["A/\\\t", "é/\\\t"], ["D/\\\t", "e/\\\t"]),
        ('root ::= ("yes" | "no") "!"*', ["yes", "no!!"], ["", "maybe"]),
        ('root ::= some-word\nsome-word ::= "x" | "é"', ["x", "é"], ["y"]),
    ],
)
def test_what_a_grammar_allows(grammar: str, whole: list[str], others: list[str]) -> None:
    read = lark_grammar("g.gbnf", grammar)
    for text in whole:
        assert accepts(read, text), text
    for text in others:
        assert not accepts(read, text), text


@pytest.mark.parametrize("name", GBNF)
def test_what_people_write_is_held_to_its_end(name: str) -> None:
    """Whole texts are allowed, with each of their beginnings, and others are not; an unfinished text can end."""
    grammar, whole, others = GBNF[name]
    read = lark_grammar("g.gbnf", grammar)
    assert [accepts(read, text) for text in whole] == [True] * len(whole)
    assert [accepts(read, text) for text in others] == [False] * len(others)
    schema, tokenizer = Schema(read, awkward_vocabulary()), awkward_tokenizer()
    for seed in range(8):
        drawn = walk(schema, tokenizer, seed, 25)
        rest = b"" if drawn.ended else extend(schema, tokenizer, drawn)
        assert rest is not None, drawn.text
        assert accepts(read, (drawn.text + rest).decode())


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= "a"\n  b\nb ::= .+', "g.gbnf, line 3: the dot for any character is not supported"),
        ('root ::= "a.b" | # ...\n  x', "g.gbnf, line 2: Rule 'x' not found"),
        ('root ::= "a" [b', "g.gbnf, line 1: unexpected end of input"),
        ('root ::= "a"\nb ::= <think>', "g.gbnf, line 2: "),
        ("root ::= [a-z&&b]", r"g.gbnf, line 1: \[a-z&&b\] is read in another way"),
        ('other ::= "a"', "g.gbnf, line 1: No 'root' rule found"),
        ("root ::= " + "(" * 5000, "g.gbnf"),
        ('root ::= "a\\', "g.gbnf"),
        ('root ::= "a\n', "g.gbnf, line 1: "),
    ],
)
def test_what_is_refused(grammar: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}"):
        lark_grammar("g.gbnf", grammar)
