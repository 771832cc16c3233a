"""Grammars in GBNF: what they allow, and refusals by line."""

import llguidance
import pytest
from gbnf_grammars import GBNF
from held_walks import awkward_tokenizer, awkward_vocabulary, extend, walk

from llmcli.errors import UsageError
from llmcli.schema.grammar import Grammar, lark_grammar
from llmcli.schema.schema import Schema

ARITHMETIC = """# numbers and brackets
root ::= expr "=" ws term "\\n"
expr ::= term ([-+*/] term)*
term ::= [0-9]{1,3} | "(" ws expr ")" ws
ws ::= [ \\t]*
"""


def is_whole(grammar: Grammar, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


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
        assert is_whole(read, text), text
    for text in others:
        assert not is_whole(read, text), text


@pytest.mark.parametrize("name", GBNF)
def test_what_people_write_is_held_to_its_end(name: str) -> None:
    """Whole texts are allowed, with each of their beginnings, and others are not; an unfinished text can end."""
    grammar, whole, others = GBNF[name]
    read = lark_grammar("g.gbnf", grammar)
    assert [is_whole(read, text) for text in whole] == [True] * len(whole)
    assert [is_whole(read, text) for text in others] == [False] * len(others)
    schema, tokenizer = Schema(read, awkward_vocabulary()), awkward_tokenizer()
    for seed in range(8):
        drawn = walk(schema, tokenizer, seed, 25)
        rest = b"" if drawn.ended else extend(schema, tokenizer, drawn)
        assert rest is not None, drawn.text
        assert is_whole(read, (drawn.text + rest).decode())


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
