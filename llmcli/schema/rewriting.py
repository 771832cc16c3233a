"""Says the keywords that llguidance does not hold by others that it holds, without letting another value fit."""

from typing import Any

from llmcli.errors import UsageError
from llmcli.schema.keywords import PATTERNS, References, type_of
from llmcli.schema.negation import Unseen, all_apart, is_plain, negated, others
from llmcli.schema.unevaluated import without_unevaluated

_MOST_ITEMS = 50  # that `contains` may count
_MOST_UNIQUE = 6  # values of an enum; each choice of them is an alternative
_REWRITTEN = {
    *("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
    *("contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
}


class Made(dict[str, Any]):
    """A schema that stands for a keyword of the user's. Attributes: place: the keyword's"""

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
    if isinstance(schema.get("items"), list):  # as older drafts have it
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
    """The schema with its place, and all that was made for it."""
    if isinstance(schema, bool):
        return schema
    made = Made(schema)
    made.place = place
    return made


def _not(schema: dict[str, Any], refs: References) -> list[Any]:
    return [negated(schema["not"], refs)]


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
    """Of drafts before 2019-09: both in one."""
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
    """Of an enum each value at most once, in its order."""
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
    "not": _not,
    "if": _if,
    "oneOf": _one_of,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
    "propertyNames": _property_names,
    "contains": _contains,
    "uniqueItems": _unique_items,
}
