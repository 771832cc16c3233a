"""Checks a JSON Schema before llguidance reads it, and writes it as llguidance holds it exactly.

llguidance leaves out keywords that it does not know, so every keyword must be one of the tables here. Places are JSON
Pointers, as `#/properties/name`.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from llmcli.differences import shown
from llmcli.errors import UsageError
from llmcli.schema.formats import FORMATS, PATTERNS
from llmcli.schema.regex import UNWRITTEN, as_in_json

# Where schemas lie in a schema: in the value, in a list, or by name.
_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES = (
    *("$ref", "type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *(*_BOUNDS, "multipleOf"),
)
# They say nothing about which values are valid.
_ANNOTATIONS = (
    *("$schema", "$id", "id", "$comment", "title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
)
# Values with which a keyword that is not held demands nothing.
_IDLE = {"uniqueItems": False, "nullable": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_HELD = {*_ONE, *_LISTS, *_NAMED, *_VALUES, *_ANNOTATIONS}

_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09")  # `items` may be a list there
_DRAFTS = (*_OLD_DRAFTS, "2020-12")

# What llguidance drops from the strings of const and enum, and from where on it rounds their numbers.
_DROPPED = re.compile(f"[{UNWRITTEN}]")
_MOST_EXACT = 2**53

_JSON_TYPES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}

# The checked schema stands here, so that a part of it can be named in its place.
_ROOT = "#/$defs/root"


class CheckedSchema:
    """A schema of which every keyword is known, and that some finite value may fit."""

    def __init__(self, name: str, schema: Any):
        """`name` is what the user knows it by. Raises: UsageError with the keyword and its place"""
        self.name = name
        self.notes: tuple[str, ...] = ()
        self._is_old = _is_old_draft(name, schema)
        self._draft = {"$schema": schema["$schema"]} if self._is_old else {}
        self._places: dict[str, Any] = {}  # all schemas in it, as llguidance gets them
        self._targets: dict[str, str] = {}  # of those with a $ref, the place that it names
        self._below: dict[str, list[str]] = {}  # the places of those that lie directly in one
        self._regexes: dict[str, dict[str, str]] = {}  # of each with expressions, these by their places
        self._root = self._check(schema, "#")
        for place, target in self._targets.items():
            if target not in self._places:
                raise UsageError(f"{name}: {place}/$ref is {target!r}, and there is no schema")
        self._check_finite()

    def document(self, place: str = "#") -> dict[str, Any]:
        """The schema for llguidance, or the part at `place` of it."""
        return {**self._draft, "$ref": _reference(place), "$defs": {"root": self._root}}

    def find_fault(self, is_faulty: Callable[[dict[str, Any]], bool]) -> tuple[str, dict[str, Any]] | None:
        """An innermost place whose document is faulty, and that document; None if there is none.

        Each part with an expression is looked at: texts of the whole schema may not come to a late part of it.
        """
        parts = {json.dumps(self._places[place]): place for place in self._regexes}
        place = next((place for place in ("#", *parts.values()) if is_faulty(self.document(place))), None)
        if place is None:
            return None
        while place is not None:
            found = place
            inner = (below for below in self._below[place] if isinstance(self._places[below], dict))
            place = next((below for below in inner if is_faulty(self.document(below))), None)
        for where, regex in self._regexes.get(found, {}).items():
            if is_faulty(alone := {"type": "string", "pattern": regex}):
                return where, alone
        return found, self.document(found)

    def _check(self, schema: Any, place: str) -> Any:
        """The schema as llguidance gets it; notes it and all that are in it."""
        self._below[place] = []
        if isinstance(schema, bool):
            checked: Any = schema
        elif isinstance(schema, dict):
            checked = self._check_object(schema, place)
        else:
            raise UsageError(f"{self.name}: {place} is a JSON {_type(schema)}, expected a schema, an object")
        self._places[place] = checked
        return checked

    def _check_inner(self, schema: Any, where: str, name: str | int, place: str) -> Any:
        below = f"{where}/{_escaped(str(name))}"
        checked = self._check(schema, below)
        self._below[place].append(below)
        return checked

    def _check_object(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        patterns = []
        for keyword, value in schema.items():
            if keyword in _IDLE and value is _IDLE[keyword]:
                continue
            self._check_keyword(keyword, schema, place)
            where = f"{place}/{_escaped(keyword)}"
            if keyword in _ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword in _NAMED and isinstance(value, dict):
                inner = {name: self._check_inner(one, where, name, place) for name, one in value.items()}
                if keyword == "patternProperties":
                    names = [self._check_regex(name, f"{where}/{_escaped(name)}", place) for name in inner]
                    inner = dict(zip(names, inner.values(), strict=True))
                checked[keyword] = inner
            elif keyword == "pattern":
                checked[keyword] = self._check_regex(value, where, place)
            elif keyword in (*_LISTS, "items") and isinstance(value, list):
                checked[keyword] = [self._check_inner(one, where, at, place) for at, one in enumerate(value)]
            elif keyword in _ONE:
                checked[keyword] = self._check_inner(value, place, keyword, place)
            elif keyword in (*_NAMED, *_LISTS):
                expected = "an object of schemas" if keyword in _NAMED else "a list of schemas"
                raise UsageError(f"{self.name}: {where} is a JSON {_type(value)}, expected {expected}")
            elif keyword == "$ref":
                if not isinstance(value, str) or not value.startswith("#"):
                    raise UsageError(f"{self.name}: {where} is {value!r}, expected a place here, as #/$defs/NAME")
                self._targets[place] = unquote(value)
                checked[keyword] = _reference(unquote(value))
            elif keyword in ("const", "enum"):
                self._check_value(value, where)
                checked[keyword] = value
            elif keyword in _BOUNDS and isinstance(value, int | float):
                checked[keyword] = self._checked_bound(keyword, value, where)
            elif keyword == "format" and value in PATTERNS:
                patterns.append({"pattern": PATTERNS[value]})
            else:
                checked[keyword] = value
        if patterns:
            checked["allOf"] = [*checked.get("allOf", []), *patterns]
        self._check_counts(schema, place)
        return checked

    def _check_regex(self, regex: Any, where: str, place: str) -> str:
        """An expression as llguidance gets it; notes it for the schema at `place`."""
        written = as_in_json(f"{self.name}: {where}", regex)
        self._regexes.setdefault(place, {})[where] = written
        return written

    def _check_value(self, value: Any, where: str) -> None:
        """Refuse a value that llguidance would write as another one. Keys are safe."""
        if isinstance(value, str) and (found := _DROPPED.search(value)):
            raise UsageError(f"{self.name}: {where} has the character U+{ord(found[0]):04X}; leave it out")
        if isinstance(value, int | float) and abs(value) > _MOST_EXACT:
            raise UsageError(f"{self.name}: {where} is {shown(value)}, expected -2**53 to 2**53, or a string")
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, one in inner:
            self._check_value(one, f"{where}/{_escaped(str(name))}")

    def _checked_bound(self, keyword: str, bound: float, where: str) -> float:
        """A bound that llguidance does not round. Raises: UsageError for one that lets only larger numbers fit"""
        sign = 1 if keyword in ("maximum", "exclusiveMaximum") else -1
        if sign * bound <= -_MOST_EXACT:
            raise UsageError(f"{self.name}: {where} is {shown(bound)}: no number from -2**53 to 2**53 fits")
        return sign * _MOST_EXACT if sign * bound > _MOST_EXACT else bound

    def _check_keyword(self, keyword: str, schema: dict[str, Any], place: str) -> None:
        where = f"{self.name}: {keyword!r} at {place}"
        if keyword == "nullable":
            raise UsageError(f'{where} is not of JSON Schema; use "type": [..., "null"]')
        if keyword == "x-guidance" or (keyword not in _HELD and not keyword.startswith("x-")):
            raise UsageError(f"{where} cannot be held exactly; leave it out, or say it by other keywords")
        value = schema[keyword]
        if keyword in ("$id", "id") and place != "#":
            raise UsageError(f"{where}: only the whole schema may have one")
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise UsageError(f"{where} is {value}, expected a number, the bound itself")
        is_list = keyword == "items" and isinstance(value, list)
        if (is_list or keyword == "additionalItems") and not self._is_old:
            raise UsageError(f"{where} is of older drafts; use prefixItems, and items for those behind them")
        if keyword == "required" and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
            raise UsageError(f"{where} is {shown(value)}, expected a list of keys")
        if keyword == "format" and value not in FORMATS:
            raise UsageError(f"{where} is {value!r}, expected one of {', '.join(FORMATS)}, or a pattern")
        if keyword == "prefixItems" and self._is_old:
            raise UsageError(f"{where} is of draft 2020-12, and $schema names an older one")

    def _check_counts(self, schema: dict[str, Any], place: str) -> None:
        """Keys that are not listed may come twice, and count as one then."""
        least = schema.get("minProperties", 0)
        listed = set(schema.get("properties", {})) & set(schema.get("required", []))
        if isinstance(least, int) and least > len(listed) + 1:
            raise UsageError(
                f"{self.name}: 'minProperties' at {place} is {least}, and required properties are {len(listed)}; more "
                "than one other property cannot be counted exactly: list them in properties and required"
            )

    def _check_finite(self) -> None:
        """Refuse a schema whose values all hold one of themselves, without end."""
        ends: set[str] = set()  # places of schemas that some finite value may fit
        num_before = -1
        while num_before < len(ends):
            num_before = len(ends)
            ends |= {place for place in self._places if place not in ends and self._may_end(place, ends)}
        place, passed = "#", list[str]()
        while place not in ends:
            if place in passed:
                raise UsageError(f"{self.name}: no value fits: {place} requires itself, and so on without end")
            passed.append(place)
            place = next(need for needs in self._needs(place) for need in needs if not any(n in ends for n in needs))

    def _may_end(self, place: str, ends: set[str]) -> bool:
        return all(any(need in ends for need in needs) for needs in self._needs(place))

    def _needs(self, place: str) -> Iterator[list[str]]:
        """What every value that fits holds or fits: of each list one place at least."""
        schema = self._places[place]
        if isinstance(schema, bool):
            return
        if place in self._targets:
            yield [self._targets[place]]
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                yield [f"{place}/{keyword}/{index}" for index in range(len(schema[keyword]))]
        for index in range(len(schema.get("allOf", []))):
            if f"{place}/allOf/{index}" in self._places:
                yield [f"{place}/allOf/{index}"]
        if schema.get("type") in ("object", ["object"]):
            for key in schema.get("required", []):
                if key in schema.get("properties", {}):
                    yield [f"{place}/properties/{_escaped(key)}"]
        if schema.get("type") in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
            prefix = schema.get("prefixItems", [])
            yield from ([f"{place}/prefixItems/{index}"] for index in range(min(len(prefix), schema["minItems"])))
            if schema["minItems"] > len(prefix) and isinstance(schema.get("items"), dict):
                yield [f"{place}/items"]


def _is_old_draft(name: str, schema: Any) -> bool:
    """Whether the schema is of a draft before 2020-12. Raises: UsageError for a draft that nobody knows"""
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    if draft is None:
        return False
    if not isinstance(draft, str) or not any(known in draft for known in _DRAFTS):
        raise UsageError(f"{name}: $schema is {draft!r}, expected JSON Schema draft 4, 6, 7, 2019-09 or 2020-12")
    return any(known in draft for known in _OLD_DRAFTS)


def _reference(place: str) -> str:
    """A `$ref` to a place of the checked schema."""
    return _ROOT + quote(place[1:], safe="/~")


def _type(value: object) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _escaped(name: str) -> str:
    """A name as a part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")
