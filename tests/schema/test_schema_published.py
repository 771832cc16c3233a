"""Schemas as people have them: what is written fits, what does not fit is not written, every text can end."""

import decimal
import json
import re
from random import Random
from typing import Any

import llguidance
from held_walks import LONGEST, awkward_tokenizer, awkward_vocabulary, extend, parse_exactly, walk
from published_values import NoValue, Values, judge_of, mutated
from written_schemas import KINDS, make_published

from llmcli.errors import UsageError
from llmcli.schema.grammar import Grammar, json_schema_grammar
from llmcli.schema.schema import Schema

SHARE = 4  # of the schemas of other tests
MOST_REFUSED = 0.15  # of all; most of them for `uniqueItems`


def is_written(begin: llguidance.LLMatcher, value: Any) -> bool:
    """With the keys in their order."""
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(value, ensure_ascii=False, separators=separators).encode()
        matcher = begin.deep_copy()
        if matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting():
            return True
    return False


def valid_values(schema: Any, judge: Any, random: Random) -> list[Any]:
    """Up to four."""
    values, valid = Values(schema, random), list[Any]()
    for _ in range(40):
        try:
            value = values.make()
        except NoValue:
            continue
        valid += [value] if judge.is_valid(value) else []
        if len(valid) == 4:
            break
    return valid


def check_values(grammar: Grammar, schema: Any, random: Random) -> tuple[int, int]:
    """Numbers of valid and of invalid values."""
    judge, num_invalid = judge_of(schema), 0
    begin = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
    valid = valid_values(schema, judge, random)
    for value in valid:
        assert is_written(begin, value), (schema, value)
        for other in [mutated(value, random) for _ in range(4)]:
            if not judge.is_valid(other):
                assert not is_written(begin, other), (schema, other)
                num_invalid += 1
    return len(valid), num_invalid


def check_walk(schema: Any, held: Schema, seed: int) -> None:
    tokenizer = awkward_tokenizer()
    drawn = walk(held, tokenizer, seed, LONGEST)
    rest = b"" if drawn.ended else extend(held, tokenizer, drawn, most=400, searches=False)
    assert rest is not None, (schema, drawn.text)
    value = parse_exactly((drawn.text + rest).decode())
    assert judge_of(schema).is_valid(value), (schema, value)


def test_published_schemas(num_schemas: int) -> None:
    vocabulary, refused, num_valid, num_invalid = awkward_vocabulary(), list[tuple[str, str]](), 0, 0
    made = make_published(num_schemas // SHARE)
    for index, (kind, schema) in enumerate(made):
        try:
            grammar = json_schema_grammar("--schema", json.dumps(schema))
        except UsageError as error:
            refused.append((kind, str(error)))
            continue
        valid, invalid = check_values(grammar, schema, Random(index))
        num_valid, num_invalid = num_valid + valid, num_invalid + invalid
        with decimal.localcontext() as context:  # jsonschema divides by multipleOf
            context.prec = 3000
            check_walk(schema, Schema(grammar, vocabulary), index)
    assert all(re.fullmatch("--schema: .*#.*", message) for _, message in refused)
    shares = ", ".join(f"{sum(of == kind for of, _ in refused)} {kind}" for kind in KINDS)
    print(f"{len(made)} schemas: {num_valid} valid and {num_invalid} invalid values; refused: {shares}")
    assert len(refused) <= MOST_REFUSED * len(made)
    assert num_valid > 2 * len(made)
    assert num_invalid > 2 * num_valid
