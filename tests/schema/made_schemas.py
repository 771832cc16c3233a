"""JSON Schemas and expressions of the kinds in public suites, drawn by a seed."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
USUAL_SCHEMAS = 48  # of a run without --schemas
KEYS = ("name", "id", "größe", "日本", "a b", 'quo"te', "tags", "x-y", "ключ", "e\u0301", "back\\slash", "emoji 🎈")
WORDS = ("red", "green", "blue", "ja", "nein", "été", "ü", 'a"b', "line\nbreak", "🎈", "")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    "^[a-z]{2,8}$",
    "[0-9]+",
    "^(foo|bar)+",
    "x$",
    "^\\d{3}-\\d{4}$",
    '^[^"]{0,5}$',
    "^[äöü]+$",
    "^#[0-9a-fA-F]{6}$",
)


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """As many of every kind."""
    return [KINDS[index % len(KINDS)](Random(f"{seed} {index}")) for index in range(count)]


def _leaf(random: Random) -> Schema:
    return random.choice((_string, _number, _integer, _enum, _boolean))(random)


def _any(random: Random, depth: int = 2) -> Schema:
    if depth == 0 or random.random() < 0.4:
        return _leaf(random)
    return random.choice((_object, _array))(random, depth - 1)


def _boolean(random: Random) -> Schema:
    return random.choice(
        ({"type": "boolean"}, {"type": "null"}, {"const": random.choice([True, None, 0, "x", [1, {}]])})
    )


def _enum(random: Random, _: int = 0) -> Schema:
    values: list[Any] = [*random.sample(WORDS, 3), random.randint(-5, 5), None, {"k": [1, 2]}]
    return {"enum": random.sample(values, random.randint(1, len(values)))}


def _string(random: Random, _: int = 0) -> Schema:
    kind = random.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": random.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": random.choice(FORMATS)}
    least = random.randint(0, 6)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 12)}


def _pattern(random: Random) -> Schema:
    return {
        "type": "string",
        "pattern": random.choice(PATTERNS),
        **({"maxLength": 30} if random.random() < 0.5 else {}),
    }


def _format(random: Random) -> Schema:
    return {"type": "string", "format": random.choice(FORMATS)}


def _integer(random: Random, _: int = 0) -> Schema:
    low = random.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + random.randint(20, 500), "exclusiveMinimum": low - 3}
    chosen = {key: bounds[key] for key in random.sample(sorted(bounds), random.randint(0, 3))}
    return {
        "type": "integer",
        **chosen,
        **({"multipleOf": random.choice((2, 3, 7, 10))} if random.random() < 0.3 else {}),
    }


def _number(random: Random, _: int = 0) -> Schema:
    low = round(random.uniform(-50, 50), random.randint(0, 3))
    high = round(low + random.uniform(1, 30), 2)
    return random.choice(
        (
            {"type": "number", "minimum": low, "maximum": high},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high},
            {"type": "number", "multipleOf": random.choice((0.5, 0.25, 0.1))},
            {"type": "number", "minimum": low},
            {"type": ["number", "null"], "maximum": high},
        )
    )


def _array(random: Random, depth: int = 1) -> Schema:
    least = random.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + random.randint(0, 3)}
    if random.random() < 0.3:
        schema["prefixItems"] = [_any(random, depth - 1) for _ in range(random.randint(1, 2))]
    schema["items"] = _any(random, max(depth - 1, 0))
    return schema


def _object(random: Random, depth: int = 1) -> Schema:
    keys = random.sample(KEYS, random.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {key: _any(random, max(depth - 1, 0)) for key in keys},
        "required": random.sample(keys, random.randint(0, len(keys))),
    }
    schema["additionalProperties"] = random.choice((False, False, _leaf(random)))
    return schema


def _map(random: Random) -> Schema:
    if random.random() < 0.5:
        return {"type": "object", "additionalProperties": _leaf(random), "minProperties": 1, "maxProperties": 3}
    return {
        "type": "object",
        "properties": {"name": _leaf(random)},
        "patternProperties": {"^x_[a-z]": _leaf(random)},
        "additionalProperties": False,
    }


def _reference(random: Random) -> Schema:
    return {
        "$defs": {"point": _object(random), "na/me ~": _leaf(random)},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/na~1me ~0"}},
        "required": ["from"],
        "additionalProperties": False,
    }


def _recursion(random: Random) -> Schema:
    if random.random() < 0.5:
        node = {
            "type": "object",
            "properties": {"value": _leaf(random), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    return {
        "type": "object",
        "properties": {"name": _leaf(random), "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["name"],
        "additionalProperties": False,
    }


def _one_of(random: Random) -> Schema:
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": _leaf(random)},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for kind in ("circle", "square", "line")
    ]
    return {"oneOf": options}


def _any_of(random: Random) -> Schema:
    return {"anyOf": [_leaf(random), _object(random), _array(random)]}


def _all_of(random: Random) -> Schema:
    first = {"type": "object", "properties": {"a": _leaf(random)}, "required": ["a"]}
    second = {"properties": {"b": _leaf(random)}, "required": random.choice(([], ["b"]))}
    return {"allOf": [first, second]}


def _any_value(random: Random) -> Schema:
    return random.choice(({}, {"type": "object"}, {"type": "array"}, {"type": ["string", "integer"]}))


def _old_draft(random: Random) -> Schema:
    draft = random.choice(("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"))
    items = [_leaf(random) for _ in range(2)]
    return {"$schema": draft, "type": "array", "items": items, "additionalItems": False, "minItems": 1}


KINDS: tuple[Callable[[Random], Schema], ...] = (
    _object, _enum, _reference, _recursion, _array, _pattern, _format, _one_of, _any_of, _all_of, _number, _integer,
    _string, _map, _any_value, _old_draft,
)  # fmt: skip


def make_regexes(count: int, seed: int = 0) -> list[str]:
    """Expressions within the syntax that `re` and llguidance share."""
    return [_regex(Random(f"{seed} {index}"), 3) for index in range(count)]


def _regex(random: Random, depth: int) -> str:
    if depth == 0 or random.random() < 0.2:
        return random.choice(
            (
                "a",
                "b",
                "é",
                "日",
                "🎈",
                " ",
                "\\d",
                "\\w",
                "\\s",
                "[a-c]",
                "[^a-c\\n]",
                "[0-9é-ü]",
                ".",
                "\\.",
                "\\[",
                "/",
                '"',
                "x{2}",
            )
        )
    inner = [_regex(random, depth - 1) for _ in range(random.randint(1, 3))]
    kind = random.randrange(4)
    if kind == 0:
        return f"(?:{'|'.join(inner)})"
    if kind == 1:
        return f"(?:{''.join(inner)}){random.choice(('?', '*', '+', '{1,3}', '{2}', '*?'))}"
    return "".join(inner)


MARKS = (
    "a",
    "b",
    "[",
    "[^",
    "]",
    "]",
    "-",
    "&&",
    "~",
    "(?:",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2",
    "}",
    ", ",
    "2",
    ".",
    "\\w",
)


def make_marks(index: int) -> str:
    """An expression, or an invalid one, from the marks of expressions."""
    random = Random(f"marks {index}")
    return random.choice(("", "", "", "(?x)")) + "".join(random.choices(MARKS, k=random.randint(2, 7)))
