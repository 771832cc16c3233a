"""What `$ref` names in a schema: places by JSON Pointers, `$id` and anchors. Nothing is fetched."""

import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from llmcli.errors import UsageError
from llmcli.schema.keywords import LISTS, NAMED, ONE, UNEVALUATED, escaped


class References:
    """The schemas that lie in a schema, by their places."""

    def __init__(self, name: str, root: Any):
        self._name = name
        self._root = root
        self._places: dict[int, str] = {}  # of the objects, by their identity
        self._bases: dict[int, str] = {}
        self._resources: dict[str, str] = {"": "#"}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: list[str] = []
        self._schemas: dict[str, Any] = {}
        self._walk(root, "#", "")

    def place(self, schema: Any, otherwise: str) -> str:
        """Where a schema of the user's lies; `otherwise` for others."""
        return self._places.get(id(schema), otherwise)

    def target(self, schema: dict[str, Any]) -> tuple[str, Any] | None:
        """The place and the schema that a schema's `$ref` or `$dynamicRef` names, None without one.

        Raises: UsageError if there is none, or which it is shows only with a value
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
        """Whether there is one; notes those that lie under a keyword that nobody knows."""
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
