"""What fits a schema's opposite, and whether two schemas exclude each other: seen in the schemas alone."""

import re
from collections.abc import Iterator
from typing import Any

from llmcli.schema.keywords import ANNOTATIONS, BOUND_TYPE, HELD, TYPES, References, type_of

_DEEPEST = 20  # schemas in schemas, a `$ref` to oneself too


class Unseen(Exception):
    """What is asked for cannot be said; the text is why."""


def others(*types: str) -> Any:
    """All values that are of none of these types."""
    return {"type": rest} if (rest := [one for one in TYPES if one not in types]) else False


def negated(schema: Any, refs: References, depth: int = 0) -> Any:
    """A schema of values that do not fit the given one; of `items` those whose first item does not.

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
    """Schemas of which one fits what `keyword` excludes."""
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
    """Whether it is seen that no value fits two of the schemas."""
    return all(are_apart(a, b, refs) for at, a in enumerate(schemas) for b in schemas[:at])


def are_apart(a: Any, b: Any, refs: References, depth: int = 0) -> bool:
    """Whether it is seen that no value fits both."""
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
    """The schemas that a value must all fit, None for one that fits nothing."""
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
    """Whether a schema demands nothing by other keywords than these."""
    return all(keyword in keywords or keyword in ANNOTATIONS or keyword not in HELD for keyword in schema)
