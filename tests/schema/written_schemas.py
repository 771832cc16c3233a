"""JSON Schemas as people write them for files and calls, drawn by a seed."""

from collections.abc import Callable
from random import Random
from typing import Any

from published_schemas import CHOICES, EXPORTED, keys, maybe, string

Schema = dict[str, Any]


# Kubernetes: custom resources.


def _resource(random: Random) -> Schema:
    return {
        "type": "object",
        "description": "A resource.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "APIVersion defines the versioned schema."},
            "kind": {"type": "string"},
            "metadata": {"type": "object", **maybe(random, 0.5, properties={"name": {"type": "string"}})},
            "spec": _resource_object(random, 3),
            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
        "x-kubernetes-group-version-kind": [{"group": "example.com", "kind": "Thing", "version": "v1"}],
    }


def _resource_object(random: Random, depth: int) -> Schema:
    properties = {name: _resource_any(random, depth) for name in keys(random, 2, 9)}
    return {
        "type": "object",
        "properties": properties,
        **maybe(random, 0.5, required=random.sample([*properties], 2)),
        **maybe(random, 0.2, **{"x-kubernetes-map-type": "atomic"}),
        **maybe(random, 0.2, **{"x-kubernetes-validations": [{"rule": "has(self.a)", "message": "no"}]}),
    }


def _resource_any(random: Random, depth: int) -> Schema:
    if depth and random.random() < 0.5:
        inner = _resource_any(random, depth - 1)
        return random.choice(
            (
                _resource_object(random, depth - 1),
                {"type": "object", "additionalProperties": inner},
                {"type": "object", "additionalProperties": {"type": "string"}, "x-kubernetes-map-type": "granular"},
                {"type": "array", "items": inner, "x-kubernetes-list-type": "atomic"},
                {"type": "array", "items": _resource_object(random, 0), "x-kubernetes-list-map-keys": ["name"],
                 "x-kubernetes-list-type": "map", "maxItems": 16},
            )
        )  # fmt: skip
    return random.choice(
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
            {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True,
             "pattern": "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"},
            {"type": "integer", "format": "int32", "minimum": 0},
            {"type": "integer", "format": "int64", "maximum": 65535},
            {"type": "boolean"},
            {"type": "string", "enum": ["Always", "IfNotPresent", "Never"], "default": "Always"},
            {"type": "string", "format": "date-time"},
            {"x-kubernetes-preserve-unknown-fields": True},
            {"type": "string", "nullable": True},
            string(random),
        )
    )  # fmt: skip


# Files of continuous integration.


def _workflow(random: Random) -> Schema:
    step = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "uses": {"type": "string", "minLength": 1},
            "run": {"type": "string"},
            "with": {"$ref": "#/definitions/env"},
            "if": {"type": ["boolean", "number", "string"]},
            "timeout-minutes": {"anyOf": [{"type": "number"}, {"$ref": "#/definitions/expression"}]},
        },
        **random.choice(
            (
                {"oneOf": [{"required": ["uses"]}, {"required": ["run"]}]},
                {"anyOf": [{"required": ["uses"]}, {"required": ["run"]}]},
                {"allOf": [{"if": {"required": ["run"]}, "then": {"not": {"required": ["uses"]}}}]},
                {"dependencies": {"with": ["uses"]}},
                {"if": {"properties": {"if": {"const": True}}}, "then": {"required": ["name"]}},
            )
        ),
        "additionalProperties": False,
    }
    job = {
        "type": "object",
        "properties": {
            "runs-on": {"$ref": "#/definitions/stringOrList"},
            "needs": {"$ref": "#/definitions/names"},
            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}, "minItems": 1},
            "strategy": {"type": "object", "properties": {"matrix": {"$ref": "#/definitions/matrix"}}},
        },
        "required": ["runs-on"],
        "additionalProperties": random.random() < 0.3,
    }
    event = {"enum": ["push", "pull_request", "release"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/workflow.json",
        "definitions": {
            "expression": {"type": "string", "pattern": "^\\$\\{\\{(.|[\r\n])*\\}\\}$"},
            "stringOrList": {"oneOf": [{"type": "string"},
                                       {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
            "names": random.choice(
                (
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"oneOf": [{"type": "array", "items": {"$ref": "#/definitions/name"}},
                               {"$ref": "#/definitions/name"}]},
                    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                )
            ),
            "name": {"type": "string", "pattern": "^[_a-zA-Z][a-zA-Z0-9_-]*$"},
            "env": {"oneOf": [{"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
                              {"$ref": "#/definitions/expression"}]},
            "matrix": {"type": "object", "minProperties": 1,
                       "patternProperties": {"^(in|ex)clude$": {"type": "array", "items": {"type": "object"}}},
                       "additionalProperties": {"type": "array"}},
            "step": step,
            "job": job,
        },
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "on": {"oneOf": [event, {"type": "array", "items": event, "minItems": 1}]},
            "env": {"$ref": "#/definitions/env"},
            "jobs": {"type": "object", "minProperties": random.choice((0, 1)), "additionalProperties": False,
                     "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": {"$ref": "#/definitions/job"}}},
        },
        "required": ["on", "jobs"],
        "additionalProperties": False,
    }  # fmt: skip


# Parameters of functions that a model calls.


def _call(random: Random) -> Schema:
    names = random.sample(("location", "unit", "query", "limit", "when", "filters", "recipients", "to"), 4)
    kinds: tuple[Schema, ...] = (
        {"type": "string", "description": "The city and country, as Paris, France"},
        {"type": "string", "enum": ["celsius", "fahrenheit"]},
        {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
        {"type": ["string", "null"], "format": random.choice(("date", "date-time", "time"))},
        {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1},
        {"type": "object", "properties": {"field": {"type": "string"}, "op": {"enum": ["=", "<", ">"]},
         "value": {"type": ["string", "number", "boolean"]}}, "required": ["field", "op", "value"],
         "additionalProperties": False},
        {"type": "number", "minimum": -90, "maximum": 90},
        {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "string"}]}, "maxItems": 3},
        {"anyOf": [string(random), {"type": "null"}], "title": "Anything"},
        {"type": "object"},
    )  # fmt: skip
    properties = {name: random.choice(kinds) for name in names}
    strict = random.random() < 0.6
    return {
        "type": "object",
        "properties": properties,
        "required": names if strict else names[:1],
        **({"additionalProperties": False} if strict else {}),
        **maybe(random, 0.2, strict=True),
    }


# Files of drafts 4 and 7, as in JSON Schema Store.


def _store(random: Random) -> Schema:
    is_old = random.random() < 0.5
    draft = "http://json-schema.org/draft-04/schema#" if is_old else "http://json-schema.org/draft-07/schema#"
    bound: Schema = {"minimum": 0, "exclusiveMinimum": True} if is_old else {"exclusiveMinimum": 0}
    definitions = {
        "path": {"type": "string", "description": "A path.", "minLength": 1},
        "level": {"type": "string", "enum": ["off", "warn", "error"]},
        "rule": {"oneOf": [{"$ref": "#/definitions/level"}, {"type": "integer", "minimum": 0, "maximum": 2},
                           {"type": "array", "items": [{"$ref": "#/definitions/level"}, {"type": "object"}],
                            "minItems": 1, "additionalItems": random.random() < 0.5}]},
        "size": {"type": "number", **bound, "title": "Size"},
        "override": {"type": "object", "properties": {"files": {"$ref": "#/definitions/paths"},
                     "extends": {"$ref": "#/definitions/config"}}, "required": ["files"]},
        "paths": {"anyOf": [{"$ref": "#/definitions/path"},
                            {"type": "array", "items": {"$ref": "#/definitions/path"}}]},
        "config": {"type": "object", "additionalProperties": False,
                   "properties": {"rules": {"$ref": "#/definitions/rules"}, "root": {"type": "boolean"}}},
        "rules": {"type": "object", "additionalProperties": {"$ref": "#/definitions/rule"}},
    }  # fmt: skip
    kinds = (
        *({"$ref": f"#/definitions/{name}"} for name in definitions),
        {"type": "array", "items": {"$ref": "#/definitions/path"}, **maybe(random, 0.5, uniqueItems=True)},
        {"type": ["string", "boolean"], "default": True, "markdownDescription": "**Yes**"},
        {"type": "object", "patternProperties": {"^[a-z]+$": string(random)}, **maybe(random, 0.5, minProperties=1)},
        {"enum": [*random.sample(CHOICES, 3), None, 1, True]},
        {"type": "integer", "multipleOf": 8, "maximum": 1024},
        {"not": {"type": "null"}},
        string(random),
    )
    properties = {name: {**random.choice(kinds), "description": f"The {name}."} for name in keys(random, 3, 8)}
    first, second = random.sample([*properties], 2)
    return {
        "$schema": draft,
        ("id" if is_old else "$id"): "https://example.com/config.json",
        "title": "A configuration file",
        "definitions": definitions,
        "type": "object",
        "properties": {"$schema": {"type": "string"}, **properties},
        **maybe(random, 0.3, dependencies={first: [second]}),
        **maybe(random, 0.4, required=[first]),
        **random.choice(({}, {"additionalProperties": False}, {"patternProperties": {"^x-": {}}})),
        **maybe(random, 0.2, allowTrailingCommas=True),
    }


KINDS: dict[str, Callable[[Random], Schema]] = {
    **EXPORTED, "resource": _resource, "workflow": _workflow, "call": _call, "store": _store,
}  # fmt: skip


def make_published(count: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """As many of every kind, with the name of the kind."""
    kinds = [*KINDS.items()]
    made = [kinds[index % len(kinds)] for index in range(count)]
    return [(name, make(Random(f"published {seed} {index}"))) for index, (name, make) in enumerate(made)]
