"""Valid and almost valid values of a schema, and their judge: jsonschema, with formats."""

import copy
import datetime
import json
import re
import urllib.parse
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
from published_schemas import PATTERNS

FORMATS = {
    "date": "2024-02-29", "time": "10:20:30Z", "date-time": "2024-02-29T10:20:30.5+02:00", "duration": "P1DT2H",
    "email": "ann@example.com", "hostname": "www.example.com", "ipv4": "10.0.0.255", "ipv6": "fe80::1",
    "uuid": "123e4567-e89b-42d3-a456-426614174000", "uri": "https://example.com/a?b=c",
}  # fmt: skip
_TIME = r"\d{2}:\d{2}:\d{2}(?:\.\d+)?(?:[Zz]|[+-]\d{2}:\d{2})"
_DURATION = (
    r"P(?:\d+W|(?=\d|T\d)(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)"
)
_EMAIL = r'(?:[^\s"@]+|"(?:[^"\\]|\\.)*")@[^\s@]+'
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


class NoValue(Exception):
    """No value was found."""


def judge_of(schema: dict[str, Any]) -> jsonschema.protocols.Validator:
    """jsonschema's judge of a schema, which checks all formats that are kept."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    formats = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid"])
    for name, regex in (("duration", _DURATION), ("hostname", rf"{_LABEL}(?:\.{_LABEL})*"),
                        ("email", _EMAIL)):  # fmt: skip
        formats.checks(name)(
            lambda text, regex=regex: not isinstance(text, str) or bool(re.fullmatch(regex, text, re.A))
        )
    formats.checks("date-time", ValueError)(_is_date_time)
    formats.checks("time", ValueError)(_is_time)
    formats.checks("uri", ValueError)(lambda text: not isinstance(text, str) or _is_uri(text))
    # OpenAPI 3.0 has false for "no bound".
    plain = json.loads(json.dumps(schema), object_hook=lambda part: {
        key: one for key, one in part.items() if one is not False or not key.startswith("exclusive")
    })  # fmt: skip
    return jsonschema.validators.extend(kind, {"pattern": _pattern})(plain, format_checker=formats)


def _pattern(judge: Any, regex: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """As ECMA-262 reads it."""
    is_unicode = "\\p" in regex
    python = re.sub(r"(?<!\\)\$$", r"\\Z", regex).replace(r"[\p{L}\p{N} ]", r"(?:[^\W_]| )")
    if isinstance(value, str) and not re.search(python, value, re.UNICODE if is_unicode else re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {regex!r}")


def _matches(regex: str, text: str) -> bool:
    return re.fullmatch(regex, text, re.ASCII) is not None


def _is_date_time(text: Any) -> bool:
    if not isinstance(text, str):
        return True
    found = re.fullmatch(r"(\d{4}-\d{2}-\d{2})[Tt](.*)", text, re.ASCII)
    return found is not None and bool(datetime.date.fromisoformat(found[1])) and _is_time(found[2])


def _is_time(text: Any) -> bool:
    """Raises: ValueError, too"""
    if not isinstance(text, str):
        return True
    plain = re.sub(r"\.\d+", "", text.upper()).replace(":60", ":59")  # leap seconds have a test of their own
    return _matches(_TIME, text) and datetime.time.fromisoformat(plain) is not None


def _is_uri(text: str) -> bool:
    return bool(urllib.parse.urlsplit(text).scheme) and re.search(r'[^!-~]|["<>\\^`{|}]', text) is None


class Values:
    """Makes values of one schema. Keys come in the order of `properties`, as texts have them."""

    def __init__(self, root: Any, random: Random):
        self._root = root
        self._random = random

    def make(self, schema: Any = None, depth: int = 6) -> Any:
        """A value that should be valid. Raises: NoValue"""
        schema = self._root if schema is None else schema
        if schema is True or schema == {}:
            return self._random.choice(["any", 1, None, [], {"k": True}])
        if schema is False or depth < 0:
            raise NoValue
        whole = self._merged(schema)
        if "const" in whole:
            return whole["const"]
        if "enum" in whole:
            return self._random.choice(whole["enum"])
        kind = whole.get("type") or self._kind(whole)
        if isinstance(kind, list):
            kind = self._random.choice(kind)
        return getattr(self, f"_{kind}")(whole, depth)

    def _merged(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema without references and choices."""
        whole: dict[str, Any] = {
            key: one for key, one in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")
        }
        parts = [self._target(schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf", [])
        parts += [self._random.choice(schema[key]) for key in ("anyOf", "oneOf") if key in schema]
        for part in parts:
            if isinstance(part, dict):
                for key, one in self._merged(part).items():
                    if key == "properties":
                        whole[key] = {**whole.get(key, {}), **one}
                    elif key == "required":
                        whole[key] = [*whole.get(key, []), *one]
                    else:
                        whole[key] = one
        return whole

    def _target(self, ref: str) -> Any:
        found = self._root
        for part in ref.split("/")[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found

    @staticmethod
    def _kind(schema: dict[str, Any]) -> str:
        if {"properties", "required", "additionalProperties"} & set(schema):
            return "object"
        return "array" if "items" in schema or "prefixItems" in schema else "string"

    def _null(self, schema: dict[str, Any], depth: int) -> None:
        return None

    def _boolean(self, schema: dict[str, Any], depth: int) -> bool:
        return self._random.random() < 0.5

    def _integer(self, schema: dict[str, Any], depth: int) -> int:
        low, high = self._bounds(schema)
        step = schema.get("multipleOf", 1)
        return self._random.randint(-(-int(low) // step), int(high) // step) * step

    def _number(self, schema: dict[str, Any], depth: int) -> float:
        low, high = self._bounds(schema)
        if high - low < 2:
            return (low + high) / 2
        return self._integer(schema, depth) + self._random.choice((0, 0.5)) if high - low > 2 else int(low)

    def _bounds(self, schema: dict[str, Any]) -> tuple[float, float]:
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        step = 1 if schema.get("type") == "integer" else 0
        low = low + step if above is True else above + step if above not in (None, False) else low
        high = high - step if below is True else below - step if below not in (None, False) else high
        if low is None and high is None:
            return -1000, 1000
        low = high - 1000 if low is None else low
        high = low + 1000 if high is None else high
        return (low + 0.5, high) if low == 0 and step == 0 and above is True else (low, high)

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        if schema.get("pattern") in PATTERNS:
            return self._random.choice(PATTERNS[schema["pattern"]])
        if schema.get("format") in FORMATS:
            return FORMATS[schema["format"]]
        least, most = schema.get("minLength", 0), schema.get("maxLength", 20)
        text = self._random.choice(("", "a", "some text", "Größe", "x" * 12, "push"))
        return (text + "abcdefg" * least)[: max(least, min(most, len(text)))]

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        items, prefix = schema.get("items", {}), schema.get("prefixItems", [])
        if isinstance(items, list):
            items, prefix = schema.get("additionalItems", {}), items
        least = max(schema.get("minItems", 0), len(prefix) if depth > 0 else 0)
        most = schema.get("maxItems", least + 2)
        count = self._random.randint(min(least, most), min(most, least + 2)) if depth > 0 else schema.get("minItems", 0)
        kinds = [*prefix, *([items] * max(0, count - len(prefix)))][:count]
        made = [self.make(one, depth - 1) for one in kinds if one is not False]
        values = self._merged(items).get("enum", []) if isinstance(items, dict) and schema.get("uniqueItems") else []
        return [one for one in values if one in made] if values else made  # in their order, as they are written

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        value = {}
        for name, one in properties.items():
            if name in required or (depth > 0 and self._random.random() < 0.6):
                try:
                    value[name] = self.make(one, depth - 1)
                except NoValue:
                    if name in required:
                        raise
        more = schema.get("additionalProperties", {})
        value |= {name: self.make(more, depth - 1) for name in required if name not in value}
        if depth > 0 and more is not False and self._random.random() < (0.2 if properties else 0.7):
            names = schema.get("propertyNames", {}).get("enum", ["another", "x"])
            value |= {name: self.make(more, depth - 1) for name in names if name not in properties}
        for regex, one in schema.get("patternProperties", {}).items():
            for name in ("include", "build", "x-a"):
                if depth > 0 and re.search(regex, name) and name not in properties:
                    value[name] = self.make(one, depth - 1)
        return value


def mutated(value: Any, random: Random) -> Any:
    """The value with one thing changed, anywhere."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    found: list[Any] = [value]
    while found:
        inner = found.pop()
        if isinstance(inner, dict | list):
            for key in inner if isinstance(inner, dict) else range(len(inner)):
                places.append((inner, key))
                found.append(inner[key])
    if not places or random.random() < 0.1:
        return random.choice([None, "text", 3, [value], {"value": value}, 1.5, True])
    within, key = random.choice(places)
    kind = random.randrange(4)
    if kind == 0 and isinstance(within, dict):
        del within[key]
    elif kind == 1 and isinstance(within, dict):
        within["unexpected"] = 1
    elif kind == 2:
        within[key] = _near(within[key], random)
    else:
        within[key] = random.choice([None, "text", -1, 1.5, [], {}, True, "", 10**6])
    return value


def _near(value: Any, random: Random) -> Any:
    """A value that differs slightly."""
    if isinstance(value, str):
        at = random.randint(0, len(value))
        return value[:at] + random.choice(("", " ", "0", "-", "é", "Z")) + value[at + random.randint(0, 1) :]
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return random.choice((-value, value + 1, value - 1, value + 0.25, value * 1000, str(value)))
    return [*value, None] if isinstance(value, list) else {**value, "": json.dumps(value)}
