"""An accepted schema never fails in the middle of a text: it is refused before, or every text can continue."""

import json

import pytest
from held_walks import awkward_tokenizer, awkward_vocabulary, walk

from llmcli.errors import UsageError
from llmcli.schema.grammar import Grammar, json_schema_grammar, lark_grammar, regex_grammar
from llmcli.schema.schema import Schema

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
