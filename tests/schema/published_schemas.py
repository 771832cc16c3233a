"""JSON Schemas as programs export them, drawn by a seed: pydantic, zod, and OpenAPI's components."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from collections.abc import Callable
from random import Random
from typing import Annotated, Any, Literal

import pydantic

Schema = dict[str, Any]
NAMES = (
    "id", "name", "kind", "title", "email", "createdAt", "updated_at", "status", "tags", "items", "owner", "price",
    "quantity", "currency", "is_active", "address", "city", "zip-code", "notes", "parent", "children", "url", "größe",
)  # fmt: skip
CHOICES = ("active", "inactive", "pending", "GET", "POST", "EUR", "USD", "low", "high", "read/write", "été", "a b")
# Expressions that people write, with matching texts.
PATTERNS: dict[str, tuple[str, ...]] = {
    "^[a-z][a-z0-9_]*$": ("a", "snake_case1"),
    "^\\d{5}(-\\d{4})?$": ("12345", "12345-6789"),
    "^[A-Z]{2,3}$": ("DE", "EUR"),
    "^(\\+\\d{1,3} ?)?[0-9 ]{6,14}$": ("+49 1234567", "0123456"),
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": ("a", "my-pod-1"),
    "^https?://": ("http://a", "https://example.com/b?c=d"),
    "^v?\\d+\\.\\d+\\.\\d+(?:-[0-9A-Za-z.-]+)?$": ("1.2.3", "v0.10.0-rc.1"),
    "^#(?:[0-9a-fA-F]{3}){1,2}$": ("#fff", "#00aaFF"),
    "\\S": ("x", " x "),
    "^[^\\s@]+@[^\\s@]+\\.[^\\s@]+$": ("a@b.c", "é@x.example"),
    "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$": ("1.5", "-0.25"),
    "^[0-9]+(ms|s|m|h)$": ("10ms", "3h"),
    "^(\\*|[a-z]+)(/(\\*|[a-z]+))?$": ("*", "text/*"),
    "^[\\p{L}\\p{N} ]{1,20}$": ("Größe 1", "日本"),
    "^.{1,64}$": ("x", "any text"),
    "^[_a-zA-Z][a-zA-Z0-9_-]*$": ("build", "_x-1"),
    "^\\$\\{\\{(.|[\r\n])*\\}\\}$": ("${{ a }}", "${{\n}}"),
    "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$": ("100m", "1.5Gi"),
}
SAFE = 9007199254740991


def maybe(random: Random, share: float, **more: Any) -> Schema:
    """`more`, in this share of all calls."""
    return more if random.random() < share else {}


def keys(random: Random, least: int, most: int) -> list[str]:
    """Some NAMES."""
    return random.sample(NAMES, random.randint(least, most))


def string(random: Random) -> Schema:
    """A schema of strings."""
    kind = random.randrange(5)
    if kind == 0:
        return {"type": "string", "pattern": random.choice([*PATTERNS])}
    if kind == 1:
        return {"type": "string", "enum": random.sample(CHOICES, random.randint(1, 5))}
    least = random.randint(0, 3)
    return {"type": "string", **maybe(random, 0.4, minLength=least), **maybe(random, 0.4, maxLength=least + 60)}


# Exports of pydantic: of generated classes.


class _Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class _Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class _Tree(pydantic.BaseModel):
    value: int
    left: "_Tree | None" = None
    children: list["_Tree"] = []


def _python_type(random: Random, depth: int) -> Any:
    """An annotation of a field."""
    plain = [
        int, str, bool, float, bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID,
        decimal.Decimal, pathlib.Path, ipaddress.IPv4Address, pydantic.AnyUrl, pydantic.SecretStr, Any, _Color,
        _Level, _Tree, pydantic.PositiveInt, pydantic.NonNegativeFloat, pydantic.AwareDatetime,
        Annotated[int, pydantic.Field(ge=random.randint(-9, 9), le=random.randint(10, 500))],
        Annotated[float, pydantic.Field(gt=0, lt=1)],
        Annotated[int, pydantic.Field(multiple_of=random.choice((2, 5, 10)))],
        Annotated[str, pydantic.Field(min_length=1, max_length=random.randint(1, 80))],
        Annotated[str, pydantic.Field(pattern="^[A-Z]{2,3}$", description="A code.", examples=["DE"])],
        Annotated[decimal.Decimal, pydantic.Field(max_digits=6, decimal_places=2)],
        Literal["a", "b", 3], Literal["only"],
    ]  # fmt: skip
    if depth == 0 or random.random() < 0.5:
        return random.choice(plain)
    inner = _python_type(random, depth - 1)
    kinds: list[Callable[[], Any]] = [
        lambda: inner | None,
        lambda: inner | _python_type(random, depth - 1),
        lambda: list[inner],  # type: ignore[valid-type]
        lambda: Annotated[list[inner], pydantic.Field(min_length=1, max_length=3)],  # type: ignore[valid-type]
        lambda: dict[str, inner],  # type: ignore[valid-type]
        lambda: tuple[inner, int],  # type: ignore[valid-type]
        lambda: tuple[inner, ...],  # type: ignore[valid-type]
        lambda: dict[Literal["x", "y"], inner],  # type: ignore[valid-type]
        lambda: set[Literal["x", "y", "z"]],
        lambda: _model(random, depth - 1),
        lambda: _tagged(random, depth - 1),
    ]
    return random.choice(kinds)()


def _model(random: Random, depth: int, **fixed: Any) -> Any:
    fields: dict[str, Any] = dict(fixed)
    for name in random.sample(("id", "name", "when", "amount", "labels", "parts", "note", "origin"), 3):
        kind = _python_type(random, depth)
        fields[name] = (kind, random.choice((..., ..., None)))
    extra = random.choice((None, None, "forbid", "allow"))
    config = pydantic.ConfigDict(extra=extra, arbitrary_types_allowed=True) if extra else None
    return pydantic.create_model(f"Model{random.randrange(10**6)}", __config__=config, **fields)


def _tagged(random: Random, depth: int) -> Any:
    cat, dog, fish = (_model(random, depth, kind=(Literal[tag], ...)) for tag in ("cat", "dog", "fish"))
    return Annotated[cat | dog | fish, pydantic.Field(discriminator="kind")]


def _pydantic(random: Random) -> Schema:
    mode: Any = random.choice(("validation", "serialization"))
    return _model(random, 2).model_json_schema(mode=mode)  # type: ignore[no-any-return]


# Exports of zod.


def _zod(random: Random) -> Schema:
    draft = random.choice(("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"))
    is_old = "draft-07" in draft
    return {"$schema": draft, **_in_draft(_zod_object(random, 2), is_old)}


def _in_draft(part: Any, is_old: bool) -> Any:
    """Lists of items are `prefixItems` since draft 2020-12."""
    if isinstance(part, list):
        return [_in_draft(one, is_old) for one in part]
    if not isinstance(part, dict):
        return part
    return {"items" if key == "prefixItems" and is_old else key: _in_draft(one, is_old) for key, one in part.items()}


def _zod_object(random: Random, depth: int, **first: Any) -> Schema:
    properties = {**first, **{name: _zod_any(random, depth) for name in keys(random, 1, 5)}}
    required = [name for name in properties if name in first or random.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **random.choice(({"additionalProperties": False},) * 3 + ({}, {"additionalProperties": {}})),
    }


def _zod_any(random: Random, depth: int) -> Schema:
    leaves: list[Schema] = [
        {"type": "string"},
        {"type": "boolean"},
        {"type": "number"},
        {"type": "integer", "minimum": -SAFE, "maximum": SAFE},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": SAFE},
        {"type": "string", "format": "date-time", "pattern": DATE_TIME},
        {"type": "string", "format": "uuid", "pattern": UUID},
        {"type": "string", "format": "email", "pattern": EMAIL},
        {"type": "string", "format": "uri"},
        {"type": "string", "const": "fixed"},
        {"type": "string", "enum": random.sample(CHOICES, 3)},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string", "const": "a"}, {"type": "number", "const": 1}, {"type": "null"}]},
        {"type": "number", "const": 3},
        {"type": "string", "minLength": 1, "maxLength": 100},
        {},
    ]
    if depth == 0 or random.random() < 0.6:
        return random.choice(leaves)
    inner = _zod_any(random, depth - 1)
    return random.choice(
        (
            {"type": "array", "items": inner},
            {"type": "array", "minItems": 1, "maxItems": 3, "items": inner},
            {"anyOf": [inner, {"type": "null"}]},
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": inner},
            {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": inner},
            {"type": "object", "additionalProperties": inner},
            {"type": "array", "prefixItems": [inner, {"type": "string"}], "minItems": 2, "maxItems": 2},
            {"type": "array", "prefixItems": [inner, {"type": "string"}]},
            _zod_object(random, depth - 1),
            {"allOf": [_zod_object(random, 0), {"type": "object", "properties": {"extra": inner}}]},
            {"anyOf": [_zod_object(random, 0, type={"type": "string", "const": tag}) for tag in ("a", "b")]},
            {"oneOf": [_zod_object(random, 0, type={"type": "string", "const": tag}) for tag in ("a", "b", "c")]},
        )
    )


DATE_TIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):"
    r"[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
UUID = (
    r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    r"|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
# zod's own has look-ahead for two dots in a row, which is written without it.
EMAIL = r"^[A-Za-z0-9_'+\-]+(?:\.[A-Za-z0-9_'+\-]+)*@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PATTERNS |= {
    DATE_TIME: ("2024-02-29T10:20:30Z", "2023-11-05T23:59:59.123Z"),
    UUID: ("123e4567-e89b-42d3-a456-426614174000",),
    EMAIL: ("ann@example.com", "a.b+c@mail.example.org"),
}


# Components of OpenAPI 3.


def _openapi(random: Random) -> Schema:
    names = ("Pet", "Owner", "Order", "Error")
    parts: Schema = {name: _openapi_object(random, names[at + 1 :]) for at, name in enumerate(names)}
    base = {"type": "object", "required": ["petType"], "discriminator": {"propertyName": "petType"},
            "properties": {"petType": {"type": "string"}, "name": {"type": "string", "example": "Rex"}}}  # fmt: skip
    parts["Base"] = base
    for tag in ("Cat", "Dog"):
        own = {"type": "object", "properties": {"petType": {"enum": [tag]}, "age": _openapi_leaf(random)}}
        parts[tag] = {"allOf": [{"$ref": "#/components/schemas/Base"}, own], "description": f"A {tag}."}
    first = random.choice((*names, "Cat", "List", "Either"))
    whole = {
        "List": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}, "maxItems": 100},
        "Either": {"oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
                   "discriminator": {"propertyName": "petType", "mapping": {"Cat": "#/components/schemas/Cat"}}},
    }.get(first, {"$ref": f"#/components/schemas/{first}"})  # fmt: skip
    return {**whole, "components": {"schemas": parts}}


def _openapi_leaf(random: Random) -> Schema:
    leaf: Schema = random.choice(
        (
            {"type": "integer", "format": "int32"},
            {"type": "integer", "format": "int64", "example": 10},
            {"type": "number", "format": "double", "minimum": 0},
            {"type": "number", "format": "float"},
            {"type": "string", "format": random.choice(("date", "date-time", "password", "byte", "binary", "uuid"))},
            {"type": "string", "format": random.choice(("email", "uri", "hostname", "ipv4", "ipv6", "phone"))},
            {"type": "boolean", "default": False},
            {"type": "integer", "minimum": 1, "maximum": 100, "exclusiveMaximum": False},
            string(random),
        )
    )
    return {
        **leaf,
        **maybe(random, 0.2, nullable=True),
        **maybe(random, 0.1, deprecated=True),
        **maybe(random, 0.1, readOnly=True),
        **maybe(random, 0.1, xml={"name": "x"}),
        **maybe(random, 0.1, externalDocs={"url": "https://example.com"}),
        **maybe(random, 0.3, description="What it is."),
    }


def _openapi_object(random: Random, others: tuple[str, ...]) -> Schema:
    properties = {name: _openapi_leaf(random) for name in keys(random, 2, 6)}
    if others:
        ref = {"$ref": f"#/components/schemas/{random.choice(others)}"}
        way = random.choice((ref, {"type": "array", "items": ref}, {"allOf": [ref], "nullable": True}))
        properties["related"] = way
    required = random.sample([*properties], random.randint(1, len(properties)))
    return {"type": "object", "required": required, "properties": properties, **maybe(random, 0.2, title="A title")}


EXPORTED: dict[str, Callable[[Random], Schema]] = {"pydantic": _pydantic, "zod": _zod, "openapi": _openapi}
