"""Keywords rewritten as others: written texts fit by jsonschema, and the expected values are written."""

import itertools
import json
from typing import Any

import jsonschema
import llguidance
import pytest
from test_schema_suite import is_written

from llmcli.errors import UsageError
from llmcli.schema.grammar import Grammar, json_schema_grammar

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}}, "required": ["kind"]}
SCALARS = [None, True, False, 0, 1, 5, 7, 1.5, -2, "", "a", "ab", "b", "cat", [], {}]
LISTS = [list(items) for length in (1, 2, 3) for items in itertools.product([1, "a", True], repeat=length)]
OBJECTS = [
    {key: value for key, value in zip("abc", values, strict=True) if value is not None}
    for values in itertools.product([None, 1, "x"], repeat=3)
]
PETS = [{"kind": "cat"}, {"kind": "cat", "lives": 9}, {"kind": "dog", "barks": True}, {"kind": "dog", "barks": 1}]
VALUES = [*SCALARS, *LISTS, *OBJECTS, *PETS, {"kind": "cow"}]

# Schemas, and whether all valid ones of VALUES are written.
SCHEMAS: list[tuple[Any, bool]] = [
    ({"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
      "discriminator": {"propertyName": "kind"}}, True),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 2}]}, True),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, True),
    ({"not": {"type": "string"}}, True),
    ({"not": {"minLength": 1}}, True),
    ({"not": {"enum": ["a", "ab", 1, None, True]}}, True),
    ({"not": {"const": ""}, "type": "string"}, True),
    ({"not": {"required": ["a", "b"]}}, True),
    ({"not": {"anyOf": [{"minimum": 5}, {"minLength": 1}, {"minItems": 2}, {"type": ["null", "boolean"]}]}}, True),
    ({"not": {"not": {"type": "array"}}}, True),
    ({"not": {"properties": {"a": {"const": "x"}}}}, True),
    ({"type": ["string", "object"], "not": {}, "anyOf": [{}]}, True),
    ({"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]},
      "else": {"required": ["c"]}}, True),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, True),
    ({"if": {"pattern": "b"}, "else": {"type": "null"}}, True),
    ({"dependentRequired": {"a": ["b"], "c": []}}, True),
    ({"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}, "required": ["b"]}}}, True),
    ({"dependencies": {"a": ["b"], "b": {"properties": {"c": {"type": "integer"}}}}}, True),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, True),
    ({"propertyNames": {"enum": ["a", "b"]}}, True),
    ({"propertyNames": {"pattern": "^[ab]$"}, "properties": {"a": {"type": "string"}}}, True),
    ({"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "string"}}, True),
    ({"propertyNames": False}, True),
    ({"contains": {"type": "string"}}, False),
    ({"contains": {"type": "string"}, "minContains": 0}, True),
    ({"contains": {"const": 1}, "minContains": 1, "maxContains": 2}, False),
    ({"uniqueItems": True, "maxItems": 1}, True),
    ({"uniqueItems": False}, True),
    ({"items": {"enum": [1, "a", 1]}, "uniqueItems": True}, False),
    ({"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, True),
    ({"allOf": [{"patternProperties": {"^[ab]$": {"type": "integer"}}}], "unevaluatedProperties": False}, True),
    ({"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": {"type": "string"}},
     True),
    ({"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}}, True),
    ({"$defs": {"n": {"$anchor": "number", "type": "number"}}, "$ref": "#number", "minimum": 1}, True),
    ({"$id": "https://example.com/a", "$defs": {"b": {"$id": "b", "type": "string"}}, "items": {"$ref": "b"}}, True),
    ({"minItems": 1.0, "maxLength": 1.0, "minimum": 1, "exclusiveMinimum": True}, True),
    ({"type": "integer", "format": "int32"}, True),
    ({"type": "string", "pattern": "^a", "format": "slug"}, True),
]  # fmt: skip


def matcher_of(grammar: Grammar) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)


@pytest.mark.parametrize(("schema", "is_whole"), SCHEMAS)
def test_what_is_written_is_valid(schema: dict[str, Any], is_whole: bool) -> None:
    judged = {**schema, "exclusiveMinimum": 1} if schema.get("exclusiveMinimum") is True else schema
    draft = jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator
    check = draft(judged)
    try:
        begin = matcher_of(json_schema_grammar("--schema", json.dumps(schema)))
    except UsageError:
        assert not any(check.is_valid(value) for value in VALUES)
        return
    num_written = 0
    for value in VALUES:
        found, is_valid = is_written(begin, value), check.is_valid(value)
        assert is_valid or not found, value
        assert found or not is_valid or not is_whole, value
        num_written += found
    assert num_written


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"requird": ["a"]}, "'requird' at # is not of JSON Schema and binds nothing"),
        ({"items": {"nullable": True}}, "'nullable' at #/items is not of JSON Schema and binds nothing; use "),
        ({"format": "phone"}, "'format' at # is 'phone', which nobody knows, and binds nothing"),
    ],
)
def test_what_nobody_knows_is_said_or_refused(schema: dict[str, Any], note: str) -> None:
    assert json_schema_grammar("--schema", json.dumps(schema)).notes[0].startswith(note)
    with pytest.raises(UsageError, match=f"^--schema: {note}.*; leave it out, or leave out --schema-strict"):
        json_schema_grammar("--schema", json.dumps(schema), is_strict=True)


@pytest.mark.parametrize("name", ["int32", "int64", "float", "double", "password", "binary", "byte"])
def test_formats_that_bind_nothing(name: str) -> None:
    assert not json_schema_grammar("-", json.dumps({"format": name}), is_strict=True).notes


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("time", ["23:59:60Z", "01:29:60+01:30", "15:59:60.5-08:00", "08:30:06.1234567890z", "05:44:60+05:45"],
         ["22:59:60Z", "23:59:61Z", "01:29:60+01:00", "23:59:60+01:00"]),
        ("date-time", ["1998-12-31T23:59:60Z", "1963-06-19t08:30:06.283185z"], ["1990-02-31T15:59:59Z"]),
        ("email", ['"joe bloggs"@example.com', '"a@b"@example.com', "joe@[127.0.0.1]", "te~st@example.com"],
         [".a@example.com", "a..b@example.com", "a@", '"a"b"@example.com', "a@-x.com"]),
        ("hostname", ["a.b.c.d.e.f", "x" * 63 + ".org", "1host", "a-b"],
         ["xn--X", "XN--aa", "ab--cd", "a..b", "-a", "a-", ".a", "a.", ".".join(["a" * 63] * 4), "x" * 64]),
        ("ipv6", ["::ffff:192.168.0.1", "1::", "::", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1"],
         ["1:2:3:4:5:6:7", "::1::", "1:2:3:4:5:6:7::8:9", "12345::", ":1"]),
    ],
)  # fmt: skip
def test_formats(name: str, valid: list[str], invalid: list[str]) -> None:
    begin = matcher_of(json_schema_grammar("-", json.dumps({"type": "string", "format": name})))
    assert [text for text in valid if not is_written(begin, text)] == []
    assert [text for text in invalid if is_written(begin, text)] == []


SPACES = "\t\n\f\r \u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"^\s$", SPACES, "a\u180e\u200b\u0085"),
        (r"^\S$", "a\u180e\u200b\u0085é", SPACES),
        (r"^[^\s]$", "a\u0085", SPACES),
        (r"^[\S\n]$", "a\n", " \ufeff"),
        (r"^\d$", "09", "a\u0663"),
        (r"^\D$", 'a\u0663"\\', "09"),
        (r"^\w$", "aZ_9", "éß-"),
        (r"^[\W]$", 'é-"', "aZ_9"),
        ("^.$", "aé\u0085🎈", "\n\r\u2028\u2029"),
        (r"^\p{Lu}$", "AÉ", "aé1"),
        (r"^[\p{Script=Greek}\d]$", "α1", "a"),
        (r"^\P{L}$", '1"\\', "aé"),
        (r"^\u{1F388}$", "🎈", "a"),
        (r"^\ud83c\udf88$", "🎈", "a"),
        (r"^\/(?<name>a)?$", "/", "a"),
        (r"^\cJ$", "\n", "J"),
    ],
)
def test_patterns_are_of_ecma_262(pattern: str, valid: str, invalid: str) -> None:
    begin = matcher_of(json_schema_grammar("-", json.dumps({"type": "string", "pattern": pattern})))
    assert [letter for letter in valid if not is_written(begin, letter)] == []
    assert [letter for letter in invalid if is_written(begin, letter)] == []


@pytest.mark.parametrize("pattern", [r"^\Z", "[]", "[]a]", "[^]a]", r"\cé", r"\bx", r"(?=a)", r"\p{Nothing}"])
def test_patterns_that_ecma_262_or_we_do_not_have(pattern: str) -> None:
    with pytest.raises(UsageError, match="^-: #/pattern"):
        json_schema_grammar("-", json.dumps({"type": "string", "pattern": pattern}))
