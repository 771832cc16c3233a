"""Refusals before a model is read: by keyword and place, or by line; and the library's faults that we avoid."""

import contextlib
import itertools
import json
import re

import jsonschema
import pytest
from held_walks import accepts

from llmcli.errors import UsageError
from llmcli.schema.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar

OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
SCHEMAS = [
    ({"properties": {"a/b": {"not": {"pattern": "a"}}}},
     "'not' at #/properties/a~1b cannot be held exactly: the opposite of 'pattern' cannot be said"),
    ({"$defs": {"a": {"items": {"contains": {"type": "string"}, "unevaluatedItems": False}}}, "$ref": "#/$defs/a"},
     "'unevaluatedItems' at #/\\$defs/a/items cannot be held exactly"),
    ({"items": {"$recursiveRef": "#"}}, "'\\$recursiveRef' at #/items cannot be held exactly"),
    ({"not": {}}, "# cannot be held: Unsatisfiable"),
    ({"items": {"format": "regex"}}, "'format' at #/items is 'regex', expected one of date,"),
    ({"allOf": [{"format": "regex"}], "unevaluatedItems": False}, "is 'regex', expected one of date,"),
    ({"format": ["date"]}, "'format' at # is .*, expected a string"),
    ({"dependentRequired": 5}, "'dependentRequired' at # has a value that it cannot have"),
    ({"propertyNames": {"not": {"const": "a"}}}, "'propertyNames' at # cannot be held exactly"),
    ({"items": {"uniqueItems": True}}, "'uniqueItems' at #/items"),
    ({"anyOf": [{}, {"if": {"pattern": "a"}, "then": {"minLength": 3}}]}, "'if' at #/anyOf/1"),
    ({"properties": [1]}, "#/properties is a JSON list, expected an object of schemas"),
    ({"anyOf": {}}, "#/anyOf is a JSON object, expected a list of schemas"),
    ({"additionalProperties": None}, "#/additionalProperties is a JSON null, expected a schema"),
    ({"allOf": [{"multipleOf": one} for one in (97, 89, 83, 79, 73, 71)], "type": "integer"},
     r"# cannot be held: it is too complex, give one with smaller counts .*fuel exhausted"),
    ({"additionalProperties": 3}, "#/additionalProperties is a JSON number, expected a schema"),
    ({"pattern": "["}, "#/pattern is '\\[', no regular expression"),
    ({"pattern": "(?x)a # ["}, r"#/pattern is .*: '\(\?x' is read in two ways; write it without \(\?x\)"),
    ({"patternProperties": {"a++b": {}}}, r"#/patternProperties/a\+\+b is 'a\+\+b': .* is read in two ways"),
    ({"pattern": "(?=a)b"}, "--schema: #/pattern cannot be held: look-around"),
    ({"properties": {"a": {"pattern": r"\bx"}}}, "#/properties/a/pattern cannot be held: lookarounds"),
    ({"patternProperties": {"^a": {}, "(?=a)b": {}}}, r"#/patternProperties/\(\?=a\)b cannot be held"),
    ({"items": {"patternProperties": {"a/b~(?!c)": {}}}}, r"#/items/patternProperties/a~1b~0\(\?!c\) cannot be held"),
    ({"patternProperties": {"a": {"items": {"pattern": "(?<=a)b"}}}}, "a/items/pattern cannot be held"),
    ({"patternProperties": {"[": {}}}, "#/patternProperties/\\[ is '\\[', no regular expression"),
    ({"patternProperties": {"^a": {}, "a$": {}}}, "--schema: # cannot be held: .* not disjoint"),
    ({**OLD, "prefixItems": [{}]}, "'prefixItems' at # is of draft 2020-12"),
    ({"$schema": "http://example.com"}, "expected JSON Schema draft 4, 6, 7, 2019-09 or 2020-12"),
    ({"$ref": "http://example.com/x"}, "#/\\$ref is 'http://example.com/x', expected a place here"),
    ({"$ref": "#/$defs/a"}, "#/\\$ref is '#/\\$defs/a', and there is no schema"),
    ({"minProperties": 2}, "'minProperties' at # is 2, and required properties are 0"),
    ({"exclusiveMinimum": True}, "'exclusiveMinimum' at # is True, expected a number"),
    ({"const": "é\x01x"}, r"#/const has the character U\+0001; leave it out"),
    ({"items": {"enum": [1, {"a/b": ["x\x7f"]}]}}, r"#/items/enum/1/a~1b/0 has the character U\+007F"),
    ({"enum": [1, 2**53 + 1]}, r"#/enum/1 is 9007199254740993, expected -2\*\*53 to 2\*\*53"),
    ({"minimum": 2**60}, r"#/minimum is 1152921504606846976: no number from -2\*\*53 to 2\*\*53 fits"),
    ({"exclusiveMaximum": -(2**53)}, "#/exclusiveMaximum is -9007199254740992: no number from"),
    ({"required": 5}, "'required' at # is 5, expected a list of keys"),
    ({"items": {"required": ["a", {}]}}, "'required' at #/items is .*, expected a list of keys"),
    ({"type": "text"}, "# cannot be held: Invalid type"),
    ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "maxLength": 3}]},
     "'oneOf' at # cannot be held exactly: it is not seen that no two of its schemas fit at once"),
    # No value fits.
    ({"properties": {"a": {"pattern": r"^\x7f$", "type": "string"}}, "required": ["a"], "type": "object"},
     "#/properties/a/pattern cannot be held: no text fits"),
    ({"type": "string", "pattern": "^.{5}$", "maxLength": 3}, "# cannot be held: no text fits"),
    (False, "# cannot be held: Unsatisfiable"),
    ({"minimum": 5, "maximum": 3, "type": "integer"}, "# cannot be held: Unsatisfiable"),
    ({"properties": {"a": {"enum": []}}, "required": ["a"], "type": "object"}, "#/properties/a cannot be held: Unsat"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "# cannot be held: Unsat.*'a'"),
    (ENDLESS, "no value fits: # requires itself"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "no value fits: # requires itself"),
    ({"$ref": "#"}, "no value fits"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
      "$ref": "#/$defs/a"}, "no value fits: .* requires itself"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "problem"), SCHEMAS)
def test_a_schema_that_cannot_be_held(schema: object, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        json_schema_grammar("--schema", json.dumps(schema))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--schema: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("3", "# is a JSON number"),
        ("[" * 99 + "]" * 99, "nested"),
        ('{"type": "integer", "type": "string"}', "^--schema: the key 'type' appears twice; keep one of them"),
        ('{"const": "a\\ud800"}', "^--schema has the lone surrogate U\\+D800, half of a character; leave it out"),
    ],
)
def test_a_text_that_is_no_schema(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        json_schema_grammar("--schema", text)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"x-order": 1, "title": "T", "description": "D", "default": 3, "examples": [1], "deprecated": True},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},  # recursion that may end
        {"properties": {"not": {"type": "null"}, "items": {}}},  # names, not keywords
        {"enum": [{"not": 1}], "default": {"not": 1}},  # values, not schemas
        {"$defs": {"50% ü": {"type": "null"}}, "$ref": "#/$defs/50%25%20%C3%BC"},
        {"type": "object", "minProperties": 2, "properties": {"a": {}}, "required": ["a"]},
        {"uniqueItems": False, "nullable": False, "unevaluatedItems": True, "unevaluatedProperties": True},
        {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}, {"enum": [True, False]}]},
        {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"enum": [3, 4]}]},
    ],
)
def test_what_is_not_refused(schema: object) -> None:
    json_schema_grammar("--schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("[", "no regular expression: unterminated"),
        ("(" * 2000 + "a" + ")" * 2000, "nests parentheses too deeply"),
        ("[[a]b]", "no regular expression: Possible nested set"),
        ("[a[b]]", r"--regex is '\[a\[b\]\]': '\[a\[b\]' is read in two ways; write \\ before a \["),
        ("[^[a]]x", "is read in two ways"),
        ("[]-b]", "is read in two ways"),
        ("[--b]", "is read in two ways"),
        ("a*+ab", r"'\*\+' is read in two ways; write \(\?:\.\.\.\) around"),
        ("a{2}+", "is read in two ways"),
        ("a{2, 3}", r"'{' is read in two ways; write \\{"),
        ("(?x)a b", r"'\(\?x' is read in two ways; write it without"),
        ("(?i)[^i]b", r"'\[\^i\]' is read in two ways; write \\u0130\\u0131 into the set"),
        ("a(?i:[^a-z])", r"'\[\^a-z\]' is read in two ways"),
        ("(?x:a b)c", "write it without"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bfoo", "lookarounds"),
        (r"a[^\s\S]", "--regex: no text fits"),
    ],
)
def test_an_expression_that_cannot_be_held(regex: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        regex_grammar("--regex", regex)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "a"\nb: <|tool|>', "line 2: a special token is not supported"),
        ('start: "a"\n\nb: %json {}', "line 3: %json is"),
        ('start: b\nb[stop="x"]: /a/', "line 2: a rule's options"),
        ("start: A\nA: /b/ & ~/c/", "line 2: ~ for"),
        ("start: @other", "line 1: another grammar"),
        ('start: "a" b', 'at 1\\(8\\).*unknown name: "b"'),
        ("", "no start rule"),
        ("start: start", "--grammar: no text fits"),
        ("start: A\nA: /[a-z]/ & /[0-9]/", "--grammar: no text fits"),
        ("start: " + " | ".join(f'"a{number}" "x"' for number in range(12000)), "it is too complex, .*max is 2000"),
    ],
)
def test_a_grammar_that_cannot_be_held(grammar: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        lark_grammar("--grammar", grammar)


def test_quoted_text_of_a_grammar_is_not_looked_at() -> None:
    lark_grammar("--grammar", 'start: "<x> @" /<~@>/ "\\"<" // <x>\n  | "b"~2 | "%json"\n# <y>\n')


KEYWORDS = (
    "required", "type", "enum", "minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "properties",
    "patternProperties", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "$schema", "$id", "title", "const", "not", "if", "contains", "propertyNames", "dependentRequired", "dependencies",
    "dependentSchemas", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "minContains", "$anchor",
    "$dynamicRef",
)  # fmt: skip


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_value_of_another_type_is_refused_or_demands_nothing(keyword: str) -> None:
    for value in (None, 5, 1.5, "x", [], {}, True, [None], [{}], {"a": 5}):
        for more in ({}, {"type": "object"}, {"type": "array"}):
            with contextlib.suppress(UsageError):
                json_schema_grammar("--schema", json.dumps({**more, keyword: value}))


def test_control_characters_of_patterns_are_never_written() -> None:
    """If one is required no text fits; if it is optional, others do."""
    for character in (r"\x01", r"\a", r"\v", "\x0b", r"\u001f", r"\x7f", "\x7f", "\\\x07"):
        grammar = json_schema_grammar("-", json.dumps({"type": "string", "pattern": f"^(a{character}b|c)$"}))
        assert accepts(grammar, '"c"')
        assert not accepts(grammar, '"ab"')


def test_an_empty_choice() -> None:
    with pytest.raises(UsageError, match="--choice is empty"):
        choice_grammar("--choice", ["a", ""])


@pytest.mark.parametrize("bound", [2**53 - 1, 2**53, 2**53 + 1, 2**62, 591064915700530116, 2**63 - 1, 2**64, 1e30])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_large_bounds(kind: str, bound: float) -> None:
    for schema in ({"maximum": bound}, {"exclusiveMaximum": bound}, {"minimum": -bound}, {"exclusiveMinimum": -bound}):
        grammar = json_schema_grammar("--schema", json.dumps({"type": kind, **schema}))
        check = jsonschema.Draft202012Validator(schema)
        for value in (int(sign * (bound + more)) for sign in (1, -1) for more in (-1025, -2, -1, 0, 1, 2, 100, 1024)):
            assert check.is_valid(value) or not accepts(grammar, str(value)), (schema, value)
        assert accepts(grammar, "0")


def test_many_choices() -> None:
    choices = [f"{stem}{number}" for number in range(700) for stem in ("", "é", "a/", '"\n')]
    grammar = choice_grammar("--choice", choices)
    assert all(accepts(grammar, choice) for choice in choices[::41])  # each compiles the grammar anew
    assert not any(accepts(grammar, text) for text in ("", "700", "é", "a/é", "é700", "1a", '"n1', "a/1 "))


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("2024-02-29", True), ("2023-02-29", False), ("1900-02-29", False), ("2000-02-29", True), ("2024-04-31", False),
        ("2024-12-31", True), ("0000-01-01", False), ("0004-02-29", True), ("2024-1-01", False),
    ],
)  # fmt: skip
def test_dates_are_those_of_the_calendar(text: str, is_allowed: bool) -> None:
    assert accepts(json_schema_grammar("--schema", '{"type": "string", "format": "date"}'), f'"{text}"') == is_allowed


def test_a_listed_key_cannot_be_written_in_another_form() -> None:
    grammar = json_schema_grammar("--schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, '{"\\u0061": "x"}')


def test_white_space_is_bounded() -> None:
    schema = '{"type": "array", "items": {"type": "object", "additionalProperties": {"type": "null"}}}'
    little, any_space = json_schema_grammar("-", schema), json_schema_grammar("-", schema, any_space=True)
    for text in ('[{"a":null},{}]', '[{"a": null, "b": null}, {}]'):
        assert accepts(little, text)
        assert accepts(any_space, text)
    for text in ('[ {"a":null}]', '[{"a":  null}]', '[{"a":\nnull}]', '[{"a" : null}]', "[{}\t]"):
        assert not accepts(little, text)
        assert accepts(any_space, text)


@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]{0,5}$', r"^[^\\]*$", "^[^a]*$", r"^[^\n]*$", "^.*$", '^[^"\\\\]*$', '^[^"\\\\\\n]{0,5}$', '[^"]',
        "^[ -!#-~]*$",
        '^([^"]|x)*$', r'^[^\]"]*$', '^[\\x00-!#-~]*$', r"^[\s\S]*$", r"^[\]\"]+$", '^\\[[^"]*\\]$', r"\\",
    ],
)  # fmt: skip
def test_a_pattern_holds_for_values_not_for_their_json(pattern: str) -> None:
    grammar = json_schema_grammar("--schema", json.dumps({"type": "string", "pattern": pattern}))
    for length in range(3):
        for characters in itertools.product('"\\\n\taé🎈[]!', repeat=length):
            value = "".join(characters)
            matches = re.search(pattern.replace("$", r"\Z"), value) is not None
            assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == matches, value
