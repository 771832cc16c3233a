"""Rewrites keywords that llguidance does not follow by others that it follows, without allowing any other value."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from llmcli.errors import UsageError
from llmcli.schema.keywords import ANNOTATIONS, BOUND_TYPE, HELD, PATTERNS, TYPES, References, type_of

# The opposite of a schema, and whether two schemas exclude each other, judged by the schemas alone.

_DEEPEST = 20  # nested schemas, also by a `$ref` to itself


class Unseen(Exception):
    """The rewriting is not possible; the text says why."""


def others(*types: str) -> Any:
    """All values of other types than these."""
    return {"type": rest} if (rest := [one for one in TYPES if one not in types]) else False


def negated(schema: Any, refs: References, depth: int = 0) -> Any:
    """A schema of values that do not fit the given one; with `items`, only those whose first item does not fit.

    Raises: Unseen
    """
    if isinstance(schema, bool):
        return not schema
    if depth > _DEEPEST:
        raise Unseen("it names itself")
    options = [
        option
        for keyword in schema
        if keyword in HELD
        for option in _options(keyword, schema, refs, depth + 1)
        if option is not False
    ]
    return {"anyOf": options} if options else False


def _options(keyword: str, schema: dict[str, Any], refs: References, depth: int) -> Iterator[Any]:
    """Schemas of the values that `keyword` excludes, as alternatives."""
    value, kind = schema[keyword], BOUND_TYPE.get(keyword)
    if keyword in ("$ref", "$dynamicRef"):
        found = refs.target(schema)
        yield negated(found[1] if found else True, refs, depth)
    elif keyword == "type":
        yield others(*(["number" if one == "integer" else one for one in _listed(value)]))
    elif keyword in ("const", "enum"):
        yield from _unlike(value if keyword == "enum" else [value])
    elif keyword == "not":
        yield value
    elif keyword == "allOf":
        yield from (negated(one, refs, depth) for one in value)
    elif keyword == "anyOf" or (keyword == "oneOf" and all_apart(value, refs)):
        yield {"allOf": [negated(one, refs, depth) for one in value]}
    elif keyword == "required":
        yield from ({"type": kind, "properties": {key: False}} for key in value)
    elif keyword == "properties":
        for key, one in value.items():
            if (opposite := negated(one, refs, depth)) is not False:
                yield {"type": kind, "properties": {key: opposite}, "required": [key]}
    elif keyword in ("items", "prefixItems"):
        before = len(schema.get("prefixItems", [])) if keyword == "items" else 0
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            if (opposite := negated(one, refs, depth)) is not False:
                items = [*[True] * (before + index), opposite]
                yield {"type": kind, "prefixItems": items, "minItems": len(items)}
    elif keyword == "contains" and not {"minContains", "maxContains"} & set(schema):
        yield {"type": kind, "items": negated(value, refs, depth)}
    elif keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") and not isinstance(value, bool):
        opposites = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum"}
        opposites |= {"exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"}
        yield {"type": kind, opposites[keyword]: value}
    elif keyword in ("minItems", "minLength", "minProperties"):
        if value > 0:
            yield {"type": kind, keyword.replace("min", "max"): int(value) - 1}
    elif keyword in ("maxItems", "maxLength", "maxProperties"):
        yield {"type": kind, keyword.replace("max", "min"): int(value) + 1}
    elif keyword == "dependentRequired":
        for key, needs in value.items():
            yield from ({"type": kind, "required": [key], "properties": {need: False}} for need in needs)
    elif not (keyword in ("$defs", "definitions") or (keyword == "uniqueItems" and value is False)):
        raise Unseen(f"the opposite of {keyword!r} cannot be said")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unlike(values: list[Any]) -> Iterator[Any]:
    """Schemas of all values but these."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    yield others(*by_type)
    for kind, some in by_type.items():
        if kind == "boolean" and len(rest := [one for one in (True, False) if one not in some]) == 1:
            yield {"const": rest[0]}
        elif kind == "number":
            bounds = sorted(some)
            yield {"type": kind, "exclusiveMaximum": bounds[0]}
            yield {"type": kind, "exclusiveMinimum": bounds[-1]}
            for low, high in zip(bounds, bounds[1:], strict=False):
                yield {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high}
        elif kind == "string":
            yield {"type": kind, "pattern": f"^{_no_word(some)}$"}
        elif kind in ("array", "object"):
            if some != [[]] and some != [{}]:
                raise Unseen("the opposite of a list or an object cannot be said")
            yield {"type": kind, "minItems" if kind == "array" else "minProperties": 1}


def _no_word(words: list[str]) -> str:
    """An expression for all texts but these."""
    starts: dict[str, list[str]] = {}
    for word in words:
        if word:
            starts.setdefault(word[0], []).append(word[1:])
    others = "".join(_code(letter) for letter in starts)
    ways = [rf"[^{others}][\s\S]*" if starts else r"[\s\S]+"]
    ways += [_code(letter) + _no_word(rest) for letter, rest in starts.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in words else "?")


def _code(letter: str) -> str:
    return letter if re.match("[A-Za-z0-9_]", letter) else rf"\U{ord(letter):08x}"


def all_apart(schemas: list[Any], refs: References) -> bool:
    """Whether the schemas show that no value fits two of them."""
    return all(are_apart(a, b, refs) for at, a in enumerate(schemas) for b in schemas[:at])


def are_apart(a: Any, b: Any, refs: References, depth: int = 0) -> bool:
    """Whether the schemas show that no value fits both."""
    if depth > _DEEPEST:
        return False
    parts_a, parts_b = _parts(a, refs, depth), _parts(b, refs, depth)
    if parts_a is None or parts_b is None:
        return True
    for parts, other in ((parts_a, b), (parts_b, a)):
        ways = [part[keyword] for part in parts for keyword in ("anyOf", "oneOf") if keyword in part]
        if any(all(are_apart(one, other, refs, depth + 1) for one in some) for some in ways):
            return True
    both = _types(parts_a) & _types(parts_b)
    return all(_are_apart_as(kind, parts_a, parts_b, refs, depth) for kind in both)


def _parts(schema: Any, refs: References, depth: int) -> list[dict[str, Any]] | None:
    """The schemas that a value must all fit; None if nothing fits."""
    if isinstance(schema, bool):
        return [] if schema else None
    parts, inner = [schema], list(schema.get("allOf", []))
    if depth < _DEEPEST and (found := refs.target(schema)):
        inner.append(found[1])
    for one in inner:
        below = _parts(one, refs, depth + 1)
        if below is None:
            return None
        parts += below
    return parts


def _types(parts: list[dict[str, Any]]) -> set[str]:
    types = set(TYPES)
    for part in parts:
        if "type" in part:
            types &= {"number" if one == "integer" else one for one in _listed(part["type"])}
        if "const" in part or "enum" in part:
            types &= {type_of(value) for value in _values(part)}
    return types


def _values(part: dict[str, Any]) -> list[Any]:
    return [part["const"]] if "const" in part else list(part["enum"])


def _are_apart_as(kind: str, a: list[dict[str, Any]], b: list[dict[str, Any]], refs: References, depth: int) -> bool:
    """Whether no value of this type fits both."""
    some_a, some_b = (
        [[one for one in _values(part) if type_of(one) == kind] for part in parts if "const" in part or "enum" in part]
        for parts in (a, b)
    )
    if any(all(one not in two for one in first) for first in some_a for two in some_b):
        return True
    for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
        if BOUND_TYPE[least] == kind:
            for one, two in ((a, b), (b, a)):
                lows = [part[least] for part in one if isinstance(part.get(least), int | float)]
                highs = [part[most] for part in two if isinstance(part.get(most), int | float)]
                if lows and highs and max(lows) > min(highs):
                    return True
    if kind != "object":
        return False
    keys = {key for part in (*a, *b) for key in part.get("required", [])}
    return any(
        are_apart(one, two, refs, depth + 1) for key in keys for one in _of_key(key, a) for two in _of_key(key, b)
    )


def _of_key(key: str, parts: list[dict[str, Any]]) -> list[Any]:
    found = [part["properties"][key] for part in parts if key in part.get("properties", {})]
    for part in parts:
        is_other = key not in part.get("properties", {}) and not part.get("patternProperties")
        if is_other and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found or [True]


def is_plain(schema: dict[str, Any], keywords: set[str]) -> bool:
    """Whether a schema has no other keywords that restrict it than these."""
    return all(keyword in keywords or keyword in ANNOTATIONS or keyword not in HELD for keyword in schema)


# `unevaluatedProperties` and `unevaluatedItems` by other keywords: by what each way to fit a schema evaluates.
#
# If a value fits in several ways at once, more of it is evaluated; a text follows one of them.

_MOST_WAYS = 64
_IN_PLACE = {"allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas"}


@dataclass
class _Way:
    """Schemas that must all fit, and what they evaluate."""

    schemas: list[Any] = field(default_factory=list)
    keys: dict[str, bool] = field(default_factory=dict)  # like `properties`, with true for each
    patterns: dict[str, bool] = field(default_factory=dict)
    num_items: int = 0
    are_all_keys: bool = False
    are_all_items: bool = False

    def __add__(self, other: "_Way") -> "_Way":
        return _Way(
            [*self.schemas, *other.schemas],
            {**self.keys, **other.keys},
            {**self.patterns, **other.patterns},
            max(self.num_items, other.num_items),
            self.are_all_keys or other.are_all_keys,
            self.are_all_items or other.are_all_items,
        )


def without_unevaluated(schema: dict[str, Any], refs: References) -> dict[str, Any]:
    """The same schema as `anyOf` of its ways. Raises: Unseen"""
    outer = {key: value for key, value in schema.items() if not key.startswith("unevaluated")}
    options = []
    for way in _ways(outer, refs, 0):
        rest: dict[str, Any] = {}
        if "unevaluatedProperties" in schema and not way.are_all_keys:
            rest |= {"properties": way.keys, "additionalProperties": schema["unevaluatedProperties"]}
            rest |= {"patternProperties": way.patterns} if way.patterns else {}
        if "unevaluatedItems" in schema and not way.are_all_items:
            rest |= {"items": schema["unevaluatedItems"]}
            rest |= {"prefixItems": [True] * way.num_items} if way.num_items else {}
        options.append({"allOf": [*way.schemas, rest]})
    return {"anyOf": options}


def _ways(schema: Any, refs: References, depth: int) -> list[_Way]:
    if depth > 20:
        raise Unseen("it names itself")
    if isinstance(schema, bool):
        return [_Way([schema])]
    if "contains" in schema and "items" not in schema:
        raise Unseen("the items that contains evaluates are not known")
    alone = {key: value for key, value in schema.items() if key not in _IN_PLACE and not key.startswith("$")}
    own = _Way(
        [alone],
        dict.fromkeys(schema.get("properties", {}), True),
        dict.fromkeys(schema.get("patternProperties", {}), True),
        len(schema.get("prefixItems", [])),
        "additionalProperties" in schema or "unevaluatedProperties" in schema,
        "items" in schema or "unevaluatedItems" in schema,
    )
    if any(key.startswith("unevaluated") for key in schema):
        own.schemas = [schema]
    choices = [[own], *([*_ways(one, refs, depth + 1)] for one in schema.get("allOf", []))]
    if found := refs.target(schema):
        choices.append(_ways(found[1], refs, depth + 1))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            found_ways = [way for one in schema[keyword] for way in _ways(one, refs, depth + 1)]
            exclusive = _Way([{"oneOf": schema[keyword]}] if keyword == "oneOf" else [])
            choices.append([way + exclusive for way in found_ways])
    if "if" in schema:
        condition, opposite = schema["if"], negated(schema["if"], refs)
        then = [
            one + two
            for one in _ways(condition, refs, depth + 1)
            for two in _ways(schema.get("then", True), refs, depth + 1)
        ]
        otherwise = [_Way([opposite]) + way for way in _ways(schema.get("else", True), refs, depth + 1)]
        choices.append(then + otherwise)
    for key, one in schema.get("dependentSchemas", {}).items():
        present = _Way([{"type": "object", "required": [key]}])
        absent = _Way([negated({"required": [key]}, refs)])
        choices.append([absent, *(present + way for way in _ways(one, refs, depth + 1))])
    ways = [sum(chosen, _Way()) for chosen in product(*choices)]
    ways = [way for way in ways if not any(one is False for one in way.schemas)]
    if len(ways) > _MOST_WAYS:
        raise Unseen("it has too many ways to fit")
    return ways


_MOST_ITEMS = 50  # that `contains` may count
_MOST_UNIQUE = 6  # values of an enum; each choice of them is an alternative
_REWRITTEN = {
    *("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
    *("contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
}


class Made(dict[str, Any]):
    """A schema that replaces a keyword of the user's. Attributes: place: the keyword's"""

    place: str


def rewritten(name: str, schema: dict[str, Any], place: str, refs: References) -> dict[str, Any]:
    """The schema without those keywords. Raises: UsageError with the keyword and its place"""
    keyword = next((keyword for keyword in schema if keyword.startswith("unevaluated")), None)
    if keyword is not None:
        if all(schema[key] is True or schema[key] == {} for key in schema if key.startswith("unevaluated")):
            return rewritten(name, {k: v for k, v in schema.items() if not k.startswith("unevaluated")}, place, refs)
        with_others = _saying(name, keyword, place, lambda: without_unevaluated(schema, refs))
        kept = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
        return {**kept, "allOf": [_made(with_others, place)]}
    plain = {key: value for key, value in schema.items() if key not in _REWRITTEN}
    if isinstance(schema.get("items"), list):  # as in older drafts
        plain["prefixItems"] = plain.pop("items")
        if "additionalItems" in schema:
            plain["items"] = schema["additionalItems"]
    more: list[Any] = []
    for keyword, rule in _RULES.items():
        if keyword in schema:
            found = _saying(name, keyword, place, lambda rule=rule: rule(schema, refs))
            more += [_made(one, f"{place}/{keyword}") for one in found if one is not True]
    if more:
        plain["allOf"] = [*schema.get("allOf", []), *more]
    return plain


def _saying(name: str, keyword: str, place: str, rule: Any) -> Any:
    try:
        return rule()
    except Unseen as why:
        raise UsageError(
            f"{name}: {keyword!r} at {place} cannot be held exactly: {why}; say it by other keywords"
        ) from None
    except (TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{name}: {keyword!r} at {place} has a value that it cannot have") from error


def _made(schema: Any, place: str) -> Any:
    """The schema with its place, in all parts made for it."""
    if isinstance(schema, bool):
        return schema
    made = Made(schema)
    made.place = place
    return made


def _if(schema: dict[str, Any], refs: References) -> list[Any]:
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    if then is True and otherwise is True:
        return []
    if then is True:
        return [{"anyOf": [condition, otherwise]}]
    opposite = negated(condition, refs)
    if otherwise is True:
        return [{"anyOf": [opposite, then]}]
    return [{"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]}]


def _one_of(schema: dict[str, Any], refs: References) -> list[Any]:
    options = schema["oneOf"]
    if not isinstance(options, list) or not options:
        raise TypeError
    if all_apart(options, refs):
        return [{"anyOf": options}]
    if len(options) > 8:
        raise Unseen("it is not seen that no two of its schemas fit at once; if none do, use anyOf")
    try:
        opposites = [negated(one, refs) for one in options]
    except Unseen as why:
        raise Unseen(f"it is not seen that no two of its schemas fit at once ({why}); if none do, use anyOf") from None
    return [{"anyOf": [{"allOf": [one, *(opposites[:at] + opposites[at + 1 :])]} for at, one in enumerate(options)]}]


def _dependent_required(schema: dict[str, Any], refs: References) -> list[Any]:
    wanted = schema["dependentRequired"].items()
    if not all(isinstance(needs, list) and all(isinstance(one, str) for one in needs) for _, needs in wanted):
        raise TypeError
    return [_depending(key, {"required": needs}) for key, needs in wanted if needs]


def _dependent_schemas(schema: dict[str, Any], refs: References) -> list[Any]:
    return [_depending(key, one) for key, one in schema["dependentSchemas"].items() if one is not True]


def _dependencies(schema: dict[str, Any], refs: References) -> list[Any]:
    """In drafts before 2019-09: both in one."""
    wanted = schema["dependencies"].items()
    named = {key: one for key, one in wanted if isinstance(one, list)}
    others = {key: one for key, one in wanted if not isinstance(one, list)}
    return [
        *_dependent_required({"dependentRequired": named}, refs),
        *_dependent_schemas({"dependentSchemas": others}, refs),
    ]


def _depending(key: str, schema: Any) -> dict[str, Any]:
    absent = [others("object"), {"type": "object", "properties": {key: False}}]
    return {"anyOf": [*absent, {"allOf": [{"type": "object", "required": [key]}, schema]}]}


def _property_names(schema: dict[str, Any], refs: References) -> list[Any]:
    names = schema["propertyNames"]
    found = [{"properties": {}, "additionalProperties": False}]
    if isinstance(names, bool):
        return [] if names else found
    if (target := refs.target(names)) and is_plain(names, {"$ref"}):
        return _property_names({"propertyNames": target[1]}, refs)
    if not is_plain(names, {"type", "const", "enum", "pattern", "minLength", "maxLength", "format"}):
        raise Unseen("names are held to type, const, enum, pattern, lengths or format")
    types = names.get("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        return found
    expressions = [names["pattern"]] if "pattern" in names else []
    expressions += [PATTERNS[names["format"]]] if names.get("format") in PATTERNS else []
    least, most = int(names.get("minLength", 0)), names.get("maxLength")
    if least or most is not None:
        expressions.append(rf"^[\s\S]{{{least},{'' if most is None else int(most)}}}$")
    if "const" in names or "enum" in names:
        if expressions:
            raise Unseen("a list of names beside a pattern or a length")
        some = [names["const"]] if "const" in names else names["enum"]
        return [{"properties": {one: True for one in some if isinstance(one, str)}, "additionalProperties": False}]
    if len(expressions) > 1:
        raise Unseen("names have a pattern and a length")
    return [{"patternProperties": {one: True}, "additionalProperties": False} for one in expressions]


def _contains(schema: dict[str, Any], refs: References) -> list[Any]:
    """The first items are those that fit."""
    one, least, most = schema["contains"], int(schema.get("minContains", 1)), schema.get("maxContains")
    if most is None and least == 0:
        return []
    if max(least, most or 0) > _MOST_ITEMS:
        raise Unseen(f"it counts more than {_MOST_ITEMS} items")
    if most is None:
        return [{"prefixItems": [one] * least, "minItems": least}]
    opposite = negated(one, refs)
    counts = range(least, int(most) + 1)
    return [{"anyOf": [{"prefixItems": [one] * count, "minItems": count, "items": opposite} for count in counts]}]


def _unique_items(schema: dict[str, Any], refs: References) -> list[Any]:
    """Each value of an enum at most once, in its order."""
    if schema["uniqueItems"] is not True or schema.get("maxItems", 2) <= 1:
        return []
    items, prefix = schema.get("items", True), schema.get("prefixItems", [])
    if items is False and len(prefix) <= 1:
        return []
    kind = schema.get("type", "array")
    if "array" not in (kind if isinstance(kind, list) else [kind]):
        return []
    if isinstance(items, dict) and (found := refs.target(items)) and is_plain(items, {"$ref"}):
        items = found[1]
    values = items.get("enum") if isinstance(items, dict) else None
    if items == {"type": "boolean"}:
        values = [False, True]
    if prefix or not isinstance(values, list) or len(values) > _MOST_UNIQUE:
        raise Unseen(f"items differ for sure only where they are of an enum of at most {_MOST_UNIQUE} values")
    typed = [(type_of(one), one) for one in values]
    distinct = [one for at, one in enumerate(values) if typed[at] not in typed[:at]]
    chosen = [[one for at, one in enumerate(distinct) if bits >> at & 1] for bits in range(1 << len(distinct))]
    ways = [{"prefixItems": [{"const": one} for one in some], "minItems": len(some), "items": False} for some in chosen]
    return [{"anyOf": [others("array"), *ways]}]


_RULES: dict[str, Any] = {
    "not": lambda schema, refs: [negated(schema["not"], refs)],
    "if": _if,
    "oneOf": _one_of,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
    "propertyNames": _property_names,
    "contains": _contains,
    "uniqueItems": _unique_items,
}
