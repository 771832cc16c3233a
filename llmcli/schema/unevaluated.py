"""`unevaluatedProperties` and `unevaluatedItems` by other keywords: by what each way to fit a schema evaluates.

Where several ways fit a value at once, more of it is evaluated; a text is held to one of them.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from llmcli.schema.keywords import References
from llmcli.schema.negation import Unseen, negated

_MOST_WAYS = 64
_IN_PLACE = {"allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas"}


@dataclass
class _Way:
    """Schemas that must all fit, and what they evaluate."""

    schemas: list[Any] = field(default_factory=list)
    keys: dict[str, bool] = field(default_factory=dict)  # as `properties`, of true
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
    """The same by `anyOf` of its ways. Raises: Unseen"""
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
