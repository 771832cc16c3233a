"""The words of JSON Schema: its keywords, what `$ref` names, and the values of `format`."""

import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from llmcli.errors import UsageError

# The keywords of JSON Schema: where schemas stand in a schema, which are enforced, and which have no effect.

# In the value, in a list, or by name.
ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = (
    *("minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "minContains", "maxContains"),
)
VALUES = (
    *("$ref", "$dynamicRef", "type", "const", "enum", "required", "dependentRequired", "uniqueItems"),
    *("pattern", "format", *COUNTS, *BOUNDS, "multipleOf"),
)
HELD = {*ONE, *UNEVALUATED, *LISTS, *NAMED, *VALUES}
# Keywords that do not restrict values, or only define what a `$ref` means.
ANNOTATIONS = {
    *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "title", "description"),
    *("default", "example", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding"),
    *("contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"),
}

# The type that a keyword restricts; values of other types fit it.
BOUND_TYPE = {
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required", "propertyNames"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
}
TYPES = ("null", "boolean", "number", "string", "array", "object")


def type_of(value: object) -> str:
    """The type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


def escaped(name: str) -> str:
    """A name as part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# Targets of `$ref` in a schema: places by JSON Pointers, `$id` and anchors. Nothing is fetched.


class References:
    """The schemas inside a schema, by place."""

    def __init__(self, name: str, root: Any):
        self._name = name
        self._root = root
        self._places: dict[int, str] = {}  # of the objects, by identity
        self._bases: dict[int, str] = {}
        self._resources: dict[str, str] = {"": "#"}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: list[str] = []
        self._schemas: dict[str, Any] = {}
        self._walk(root, "#", "")

    def place(self, schema: Any, otherwise: str) -> str:
        """The place of a schema of the user's; `otherwise` for others."""
        return self._places.get(id(schema), otherwise)

    def target(self, schema: dict[str, Any]) -> tuple[str, Any] | None:
        """The place and the schema that `$ref` or `$dynamicRef` names; None without one.

        Raises: UsageError if there is none, or if it depends on the value
        """
        keyword = next((keyword for keyword in ("$ref", "$dynamicRef") if keyword in schema), None)
        if keyword is None:
            return None
        ref, where = schema[keyword], f"{self._name}: {self.place(schema, '#')}/{keyword}"
        if not isinstance(ref, str):
            raise UsageError(f"{where} is {ref!r}, expected a place here, as #/$defs/NAME")
        base = self._bases.get(id(schema), "")
        uri, fragment = urldefrag(base + ref if ref.startswith("#") else urljoin(base, ref))
        resource = self._resources.get(uri)
        if resource is None:
            raise UsageError(f"{where} is {ref!r}, expected a place here, as #/$defs/NAME; nothing is fetched")
        place = (
            resource + unquote(fragment) if fragment[:1] in ("", "/") else self._anchors.get((uri, unquote(fragment)))
        )
        if place is None or not self._is_schema(place, uri):
            raise UsageError(f"{where} is {ref!r}, and there is no schema")
        found = self._schemas[place]
        is_dynamic = keyword == "$dynamicRef" and isinstance(found, dict) and found.get("$dynamicAnchor") == fragment
        if is_dynamic and self._dynamic.count(fragment) > 1:
            raise UsageError(f"{where} is {ref!r}, which several schemas may be; name one by $ref")
        return place, found

    def _is_schema(self, place: str, base: str) -> bool:
        """Whether there is a schema at the place; notes those under unknown keywords."""
        found = self._root
        if place not in self._schemas:
            for part in place.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and re.fullmatch("[0-9]+", part) and int(part) < len(found):
                    found = found[int(part)]
                elif isinstance(found, dict) and part in found:
                    found = found[part]
                else:
                    return False
            if not isinstance(found, dict | bool):
                return False
            self._walk(found, place, base)
        return True

    def _walk(self, schema: Any, place: str, base: str) -> None:
        self._schemas[place] = schema
        if not isinstance(schema, dict):
            return
        if "$recursiveRef" in schema:
            raise UsageError(
                f"{self._name}: '$recursiveRef' at {place} cannot be held exactly; name the schema by $ref"
            )
        if isinstance(named := schema.get("$id"), str):
            if named.startswith("#"):
                self._anchors[base, named[1:]] = place
            else:
                base = urldefrag(urljoin(base, named))[0]
                self._resources[base] = place
        self._places[id(schema)], self._bases[id(schema)] = place, base
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors[base, anchor] = place
                self._dynamic += [anchor] if keyword == "$dynamicAnchor" else []
        for keyword, value in schema.items():
            where = f"{place}/{escaped(keyword)}"
            if keyword in NAMED and isinstance(value, dict):
                for name, inner in value.items():
                    self._walk(inner, f"{where}/{escaped(name)}", base)
            elif keyword in (*LISTS, "items") and isinstance(value, list):
                for index, inner in enumerate(value):
                    self._walk(inner, f"{where}/{index}", base)
            elif keyword in (*ONE, *UNEVALUATED):
                self._walk(value, where, base)


# The values of JSON Schema's `format` that texts follow, most of them by our own patterns.
#
# Formats that allow other scripts are written in ASCII alone, which is valid, too.

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_FRACTION = r"(?:\.[0-9]+)?"


def _leap_seconds() -> str:
    """Leap seconds are at 23:59:60 in UTC; offsets are whole hours, or end in 30 or 45 minutes."""
    ways = [rf"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"]
    for sign in (1, -1):
        for offset in range(15, 24 * 60, 15):
            if offset % 60 != 15:
                hour, minute = divmod((23 * 60 + 59 + sign * offset) % (24 * 60), 60)
                mark = "+" if sign > 0 else "-"
                ways.append(rf"{hour:02}:{minute:02}:60{_FRACTION}[{mark}]{offset // 60:02}:{offset % 60:02}")
    return "|".join(ways)


_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    rf"|{_leap_seconds()})"
)

# A label has no hyphens at positions 3 and 4: IDNA uses those, by rules that no pattern expresses. A name has up to
# three labels of 63 letters or ten of 24, which keeps it below 254.
_L, _M = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(most: int) -> str:
    return f"{_L}(?:{_L}|{_M}{_L}|{_M}{_L}{_M}{{0,{most - 4}}}{_L}|{_M}-{_L}(?:{_M}{{0,{most - 5}}}{_L})?)?"


_HOST = rf"(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(24)}(?:\.{_label(24)}){{0,9}})"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{6}}{_LAST}",
        f"::(?:{_H}:){{5}}{_LAST}",
        *(f"(?:(?:{_H}:){{0,{before}}}{_H})?::(?:{_H}:){{{4 - before}}}{_LAST}" for before in range(5)),
        f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
        f"(?:(?:{_H}:){{0,6}}{_H})?::",
    ]
)
_IPV6 = f"(?:{_IPV6})"

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_LOCAL = rf'(?:{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*")'
_EMAIL = rf"^{_LOCAL}@(?:{_HOST}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])$"

_CODED = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@\-]|{_CODED})"
_FIRST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@\-]|{_CODED})"  # a colon would end a scheme
_AUTHORITY = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:\-]|{_CODED})*@)?(?:[A-Za-z0-9._~!$&'()*+,;=\-]|{_CODED})*(?::[0-9]*)?"
_REST = (
    rf"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
    rf"|{_FIRST}+(?:/{_SEGMENT}*)*)?(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?$"
)
_URI_REFERENCE = rf"^(?:[A-Za-z][A-Za-z0-9+.\-]*:)?{_REST}"
_VARIABLE = rf"(?:\w|{_CODED})(?:\.?(?:\w|{_CODED}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = rf"^(?:[!#$&(-;=?-Z\[\]_a-z~]|{_CODED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

# llguidance's own patterns allow 29 February in every year, minutes of 61 seconds, and labels that begin with xn--.
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^{_IPV6}$",
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "iri": f"^[A-Za-z][A-Za-z0-9+.\\-]*:{_REST}",
    "uri-template": _URI_TEMPLATE,
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
FORMATS = (*PATTERNS, "duration", "uuid", "uri")
REFUSED_FORMATS = ("regex",)
# Formats of OpenAPI and the like; they say how a program stores a value.
FREE_FORMATS = ("int32", "int64", "float", "double", "password", "binary", "byte")
