"""The keywords of JSON Schema: where schemas lie in a schema, what is held, and what binds nothing."""

# In the value, in a list, or by name.
ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = (
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minContains",
    "maxContains",
)
VALUES = (
    *(
        "$ref",
        "$dynamicRef",
        "type",
        "const",
        "enum",
        "required",
        "dependentRequired",
        "uniqueItems",
        "pattern",
        "format",
    ),
    *(*COUNTS, *BOUNDS, "multipleOf"),
)
HELD = {*ONE, *UNEVALUATED, *LISTS, *NAMED, *VALUES}
# They say nothing about which values are valid, or only what a `$ref` means.
ANNOTATIONS = {
    *(
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$vocabulary",
        "$comment",
        "title",
        "description",
        "default",
    ),
    *("example", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"),
    *("contentSchema", "discriminator", "externalDocs", "xml"),
}

# The type that a keyword binds; values of other types fit it.
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
    """A name as a part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")
