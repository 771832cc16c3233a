"""Texts drawn under masks fit their schema: jsonschema and re accept the whole ones.

Cut ones are completed by further tokens, and then checked too.
"""

import decimal
import itertools
import json
import re
from pathlib import Path
from random import Random

import jsonschema
import llguidance
import pytest
from held_walks import (
    LONGEST,
    awkward_tokenizer,
    awkward_vocabulary,
    extend,
    parse_exactly,
    schema_validator,
    shared,
    walk,
)
from made_schemas import KINDS, USUAL_SCHEMAS, make_marks, make_regexes, make_schemas

from llmcli.errors import UsageError
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.schema.grammar import json_schema_grammar, regex_grammar
from llmcli.schema.schema import Schema, Vocabulary
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

NUM_SEEDS = 5


@pytest.fixture(autouse=True)
def exact_numbers():
    """jsonschema divides by multipleOf: exactly, with decimals of enough digits."""
    with decimal.localcontext() as context:
        context.prec = 3000
        yield


def check_json(schema: dict, held: Schema, tokenizer: Tokenizer, seeds: range) -> tuple[int, int]:
    """Numbers of texts that ended by themselves and of cut ones."""
    check, ended = schema_validator(schema), 0
    for seed in seeds:
        drawn = walk(held, tokenizer, seed, LONGEST)
        rest = b"" if drawn.ended else extend(held, tokenizer, drawn)
        assert rest is not None, (schema, drawn.text)
        text = (drawn.text + rest).decode()
        check.validate(parse_exactly(text))
        ended += drawn.ended
    return ended, len(seeds) - ended


def test_json_is_valid(num_schemas: int) -> None:
    tokenizer, vocabulary = awkward_tokenizer(), awkward_vocabulary()
    schemas = make_schemas(num_schemas)
    grammars = [json_schema_grammar("--schema", json.dumps(schema)) for schema in schemas]
    counts = [
        check_json(schema, Schema(grammar, vocabulary), tokenizer, range(NUM_SEEDS))
        for schema, grammar in zip(schemas, grammars, strict=True)
    ]
    ended, cut = (sum(column) for column in zip(*counts, strict=True))
    print(f"schemas: {ended} texts ended, {cut} were cut")
    assert ended > cut > 0


def check_regex(regex: str, held: Schema, tokenizer: Tokenizer, seeds: range) -> tuple[int, int]:
    """As `check_json`."""
    ended = 0
    for seed in seeds:
        drawn = walk(held, tokenizer, seed, 40)
        rest = b"" if drawn.ended else extend(held, tokenizer, drawn)
        assert rest is not None, (regex, drawn.text)
        text = (drawn.text + rest).decode()
        assert re.fullmatch(regex, text, re.ASCII), (regex, text)
        ended += drawn.ended
    return ended, len(seeds) - ended


def test_texts_match_their_expressions(num_schemas: int) -> None:
    tokenizer, vocabulary = awkward_tokenizer(), awkward_vocabulary()
    regexes = make_regexes(num_schemas * 2 // 5)
    counts = [
        check_regex(regex, Schema(regex_grammar("--regex", regex), vocabulary), tokenizer, range(NUM_SEEDS))
        for regex in regexes
    ]
    ended, cut = (sum(column) for column in zip(*counts, strict=True))
    print(f"expressions: {ended} texts ended, {cut} were cut")
    assert ended > len(regexes)


def test_what_is_not_read_alike_is_refused(num_schemas: int) -> None:
    """The short texts that fit an expression are those that match it, for any marks in it."""
    texts = ["".join(drawn) for length in range(4) for drawn in itertools.product("ab]-2 &[", repeat=length)]
    num_read = 0
    for index in range(num_schemas * 15):
        regex = make_marks(index)
        try:
            grammar = regex_grammar("--regex", regex)
        except UsageError:
            continue
        num_read += 1
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
        for text in Random(index).sample(texts, 40):
            held = matcher.deep_copy()
            fits = held.try_consume_tokens([*text.encode()]) == len(text) and held.is_accepting()
            assert fits == (re.fullmatch(regex, text, re.ASCII) is not None), (regex, text)
    print(f"expressions of marks: {num_read} are read")
    assert num_read > num_schemas


USUAL, OTHERS = ("storyteller", "llama2", "qwen2"), ("llama3", "stories260K")


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_real_tokenizers(name: str, num_schemas: int) -> None:
    """Byte-fallback and byte-level ones; the first space of a text is dropped if the tokenizer adds one."""
    folder = resource_folder(STORYTELLER) if name == "storyteller" else find(name)
    tokenizer = load_tokenizer(folder)
    eos = tokenizer.eos_token_ids or {min(tokenizer.special_token_ids)}
    vocabulary = Vocabulary(tokenizer, eos, tokenizer.vocab_size + 3)
    ended = cut = 0
    for schema in make_schemas(max(len(KINDS), num_schemas // 10), seed=3):
        held = Schema(json_schema_grammar("--schema", json.dumps(schema)), vocabulary)
        counts = check_json(schema, held, tokenizer, range(num_seeds(num_schemas)))
        ended, cut = ended + counts[0], cut + counts[1]
    for regex in make_regexes(max(6, num_schemas // 25), seed=3):
        held = Schema(regex_grammar("--regex", regex), vocabulary)
        counts = check_regex(regex, held, tokenizer, range(num_seeds(num_schemas)))
        ended, cut = ended + counts[0], cut + counts[1]
    print(f"{name}: {ended} texts ended, {cut} were cut")


def num_seeds(num_schemas: int) -> int:
    """One for each schema in a usual run: a large vocabulary is slow."""
    return NUM_SEEDS if num_schemas > USUAL_SCHEMAS else 1


def find(name: str) -> Path:
    folder = shared(f"models/{name}" if name == "stories260K" else f"tokenizers/{name}")
    if not folder.is_dir():
        pytest.skip(f"{name} is not in ../shared")
    return folder


def test_without_a_mask_the_same_walk_is_not_valid() -> None:
    """The check can fail: a schema that allows less than the text's own."""
    tokenizer, vocabulary = awkward_tokenizer(), awkward_vocabulary()
    held = Schema(json_schema_grammar("--schema", '{"type": "integer"}'), vocabulary)
    with pytest.raises(jsonschema.ValidationError):
        check_json({"type": "integer", "maximum": 3}, held, tokenizer, range(20))
