"""Finds a schema whose values all hold one of themselves, without end."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llmcli.schema.keywords import escaped


def find_endless(schemas: Mapping[str, Any]) -> str | None:
    """The path of such a schema that the first one needs, None if some finite value may fit. `schemas` are by paths."""
    ends: set[str] = set()  # paths of schemas that some finite value may fit
    num_before = -1
    while num_before < len(ends):
        num_before = len(ends)
        ends |= {path for path in schemas if path not in ends and _may_end(schemas, path, ends)}
    path, passed = "#/$defs/0", list[str]()
    while path not in ends:
        if path in passed:
            return path
        passed.append(path)
        path = next(need for needs in _needs(schemas, path) for need in needs if not any(n in ends for n in needs))
    return None


def _may_end(schemas: Mapping[str, Any], path: str, ends: set[str]) -> bool:
    return all(any(need in ends for need in needs) for needs in _needs(schemas, path))


def _needs(schemas: Mapping[str, Any], path: str) -> Iterator[list[str]]:
    """What every value that fits holds or fits: of each list one path at least."""
    schema = schemas[path]
    if isinstance(schema, bool):
        return
    if "$ref" in schema:
        yield [unquote(schema["$ref"])]
    if schema.get("anyOf"):
        yield [f"{path}/anyOf/{index}" for index in range(len(schema["anyOf"]))]
    for index in range(len(schema.get("allOf", []))):
        if f"{path}/allOf/{index}" in schemas:
            yield [f"{path}/allOf/{index}"]
    if schema.get("type") in ("object", ["object"]):
        for key in schema.get("required", []):
            if key in schema.get("properties", {}):
                yield [f"{path}/properties/{escaped(key)}"]
    if schema.get("type") in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        prefix = schema.get("prefixItems", [])
        yield from ([f"{path}/prefixItems/{index}"] for index in range(min(len(prefix), schema["minItems"])))
        if schema["minItems"] > len(prefix) and isinstance(schema.get("items"), dict):
            yield [f"{path}/items"]
