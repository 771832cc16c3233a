"""Checks a JSON Schema before llguidance reads it, and writes it in a form that llguidance follows exactly.

llguidance ignores unknown keywords, so every keyword must be one of keywords.py. Places are the user's, as
`#/properties/name`; paths are those in llguidance's form.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from llmcli.differences import shown
from llmcli.errors import UsageError
from llmcli.schema import keywords
from llmcli.schema.rewriting import Made, rewritten

# Translates regular expressions of ECMA-262, as in JSON Schema, into a form that Python and llguidance read alike.
#
# Classes mean what they mean in ECMA: `\d` and `\w` are ASCII, `\s` is its white space, the dot all but line ends.

_SPACES = (
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_RANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "s": _SPACES,
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_DOT = r"[^\n\r\u2028\u2029]"
_PROPERTY = re.compile(r"\\[pP]\{[A-Za-z_0-9]+(?:=[A-Za-z_0-9]+)?\}")
_ECMA_PARTS = re.compile(
    rf"(?P<property>{_PROPERTY.pattern})|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{{2}})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{{2}})"
    r"|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\c(?P<control>[A-Za-z])|\\(?P<nul>0)(?![0-9])|\\(?P<kind>[sSdDwW])"
    r"|\\(?P<slash>/)|\\.|(?P<named>\(\?<(?![=!])[^>]*>)|(?P<begin>\[\^?)|(?P<end>\])|(?P<dot>\.)",
    re.S,
)


def from_ecma(regex: str) -> str:
    """The same expression; what is not ECMA-262 stays as it is."""
    is_in_set, written, last = False, "", 0
    for found in _ECMA_PARTS.finditer(regex):
        written += regex[last : found.start()]
        last = found.end()
        kind = found.lastgroup
        if kind == "begin" and not is_in_set:
            is_in_set = True
        elif kind == "end":
            is_in_set = False
        written += _translated(found, is_in_set)
    return written + regex[last:]


def _translated(found: re.Match[str], is_in_set: bool) -> str:
    kind = found.lastgroup
    if kind == "low":
        high, low = int(found["high"], 16), int(found["low"], 16)
        return _code(0x10000 + (high - 0xD800 << 10) + low - 0xDC00)
    if kind == "code" and int(found["code"], 16) <= 0x10FFFF:
        return _code(int(found["code"], 16))
    if kind == "control":
        return _code(ord(found["control"]) % 32)
    if kind == "nul":
        return _code(0)
    if kind == "slash":
        return "/"
    if kind == "named":
        return "(?:"
    if kind == "property":
        return found[0] if is_in_set else f"[{found[0]}]"
    if kind == "kind":
        ranges = _RANGES[found[0][1].lower()]
        if found[0][1].isupper():
            ends = [-1, *(end for _, end in ranges)]
            starts = [*(start for start, _ in ranges), 0x110000]
            ranges = tuple((end + 1, start - 1) for end, start in zip(ends, starts, strict=True) if end + 1 < start)
        inner = "".join(_code(start) + (f"-{_code(end)}" if end > start else "") for start, end in ranges)
        return inner if is_in_set else f"[{inner}]"
    return _DOT if kind == "dot" and not is_in_set else found[0]


def _code(code: int) -> str:
    return chr(code) if 0x30 <= code < 0x7B and chr(code).isalnum() else rf"\U{code:08x}"


# Checks that Python's `re` reads a regular expression, and reads it as llguidance does.

# The parts of an expression that `re` has read: escapes, bracket expressions, counts, and by name those that llguidance
# reads, or may read, differently.
_SET = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_PARTS = re.compile(
    rf"\\.|(?P<set>{_SET})|(?P<verbose>\(\?[aiLmsu]*x)|(?P<case>\(\?[aLmsu]*i)"
    r"|(?P<possessive>(?:[*+?]|\{[0-9,]+\})\+)"
    r"|\{[0-9,]+\}|(?P<brace>\{)",
    re.S,
)
# Parts of sets that only llguidance has: sets, operations, and a first ] that begins no range.
_UNLIKE_IN_SET = re.compile(r"\[|&&|--|~~|^\^?\]-")
_REMEDIES = {
    "set": r"write \ before a [ & - ~ or ] in a set",
    "verbose": "write it without (?x)",
    "possessive": "write (?:...) around what the second mark repeats",
    "brace": r"write \{ for a brace that begins no count",
    "dotless": r"write \u0130\u0131 into the set: they are forms of i for Python alone",
}


def check_regex(where: str, regex: str, *, shown: str | None = None) -> None:
    """`shown` is what the user gave, if it differs.

    Raises: UsageError if `re` does not read it, or llguidance would read it differently
    """
    shown = regex if shown is None else shown
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets in sets, which llguidance has and Python does not
            re.compile(regex)
    except RecursionError as error:
        raise UsageError(f"{where} nests parentheses too deeply: {shown!r:.100}; use fewer") from error
    except (re.error, FutureWarning, OverflowError) as error:
        raise UsageError(f"{where} is {shown!r:.100}, no regular expression: {error}") from error
    ignores_case = False
    for found in _PARTS.finditer(regex):
        kind = found.lastgroup
        ignores_case = ignores_case or kind == "case"
        if kind == "set" and ignores_case and _excludes_turkish_i(found[0]):
            kind = "dotless"
        if kind in (None, "case") or (kind == "set" and not _is_unlike(found[0])):
            continue
        raise UsageError(f"{where} is {shown!r:.100}: {found[0]!r:.40} is read in two ways; {_REMEDIES[str(kind)]}")


def _excludes_turkish_i(brackets: str) -> bool:
    """Whether a set excludes these two only as forms of i: Python counts them as such if case is ignored."""
    return any(re.match(brackets, letter) and not re.match(brackets, letter, re.I) for letter in "\u0130\u0131")


def _is_unlike(brackets: str) -> bool:
    return _UNLIKE_IN_SET.search(re.sub(r"\\.", "_", brackets[1:-1], flags=re.S)) is not None


# Control characters without a letter in JSON, and one that llguidance also drops: our strings have none of them.
UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f\x7f"
# Sets, and single characters that may be one of these. `check_regex` has refused sets in sets.
_NOT_ECMA = re.compile(r"(?s)^(?:\\.|[^\\])*?(?P<what>\\c(?![A-Za-z])|\\[AZz]|(?<!\\)\[\^?\])")
_CHARACTERS = re.compile(
    rf"{_SET}|\\?[{UNWRITTEN}]|\\(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}|[av])|(?P<other>\\.)", re.S
)


def as_in_json(where: str, regex: str) -> str:
    r"""The expression for JSON strings whose values match the given one, of ECMA-262.

    llguidance lets `\"` and `\\` pass a set that has all control characters except these two, and ignores a control
    character outside a set. So the characters that no text has are removed from the expression.
    Raises: UsageError, as `check_regex`.
    """
    if not isinstance(regex, str):
        raise UsageError(f"{where} is {regex!r}, expected a regular expression")
    if found := _NOT_ECMA.search(regex):
        raise UsageError(
            f"{where} is {regex!r:.100}: {found['what']!r} is read in two ways, or is not of ECMA-262; "
            r"write \] for a bracket, and [\s\S] for any character"
        )
    ours = from_ecma(regex)
    # Python has no properties: one letter stands for each.
    check_regex(where, _PROPERTY.sub("a", ours), shown=regex)
    return _CHARACTERS.sub(lambda found: found[0] if found["other"] else _written(found[0]), ours)


def _written(characters: str) -> str:
    return rf"[{characters}&&[^{UNWRITTEN}]]"


# Finds a schema in which every value contains a value of the same schema, without end.


def find_endless(schemas: Mapping[str, Any]) -> str | None:
    """The path of such a schema that the first one needs; None if some finite value fits. `schemas` are by path."""
    ends: set[str] = set()  # paths of schemas that some finite value may fit
    num_before = -1
    while num_before < len(ends):
        num_before = len(ends)
        ends |= {
            path
            for path in schemas
            if path not in ends and all(any(need in ends for need in needs) for needs in _needs(schemas, path))
        }
    path, passed = "#/$defs/0", list[str]()
    while path not in ends:
        if path in passed:
            return path
        passed.append(path)
        path = next(need for needs in _needs(schemas, path) for need in needs if not any(n in ends for n in needs))
    return None


def _needs(schemas: Mapping[str, Any], path: str) -> Iterator[list[str]]:
    """Lists of paths: every value that fits must contain or fit at least one path of each list."""
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
                yield [f"{path}/properties/{keywords.escaped(key)}"]
    if schema.get("type") in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        prefix = schema.get("prefixItems", [])
        yield from ([f"{path}/prefixItems/{index}"] for index in range(min(len(prefix), schema["minItems"])))
        if schema["minItems"] > len(prefix) and isinstance(schema.get("items"), dict):
            yield [f"{path}/items"]


_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09")
_DRAFTS = (*_OLD_DRAFTS, "2020-12")

# Characters that llguidance drops from strings of const and enum, and the number from which it rounds.
_DROPPED = re.compile(f"[{UNWRITTEN}]")
_MOST_EXACT = 2**53

_JSON_TYPES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
_PATH = re.compile(r"#/\$defs/[0-9]+[^\s'\"]*")


class CheckedSchema:
    """A schema with only known keywords, which some finite value may fit.

    Attributes: notes: parts without effect that somebody may rely on, each in one line
    """

    def __init__(self, name: str, schema: Any, *, is_strict: bool = False):
        """`name` is the user's name for it; `is_strict` refuses what would be a note.

        Raises: UsageError with the keyword and its place
        """
        self.name = name
        self._is_strict = is_strict
        self._is_old = _is_old_draft(name, schema)
        self._notes: dict[str, None] = {}
        self._references = keywords.References(name, schema)
        self._schemas: dict[str, Any] = {}  # all schemas in it, in llguidance's form, by path
        self._shown: dict[str, str] = {}  # their places
        self._below: dict[str, list[str]] = {}  # for each, the paths directly inside it
        self._regexes: dict[str, dict[str, str]] = {}  # for each, its expressions by place
        self._definitions: dict[str, str] = {"#": "#/$defs/0"}  # the paths of named schemas, by place
        self._roots: list[Any] = []
        found = [schema]
        while found:
            place = list(self._definitions)[len(self._roots)]
            self._named: dict[str, Any] = {}
            self._roots.append(self._check(found.pop(0), self._definitions[place], place))
            found += self._named.values()
        if endless := find_endless(self._schemas):
            raise UsageError(f"{name}: no value fits: {self._shown[endless]} requires itself, and so on without end")
        self.notes = tuple(self._notes)

    def document(self, path: str = "#/$defs/0") -> dict[str, Any]:
        """The schema for llguidance, or the part of it at `path`."""
        return {"$ref": _quoted(path), "$defs": {str(index): root for index, root in enumerate(self._roots)}}

    def find_fault(
        self, is_faulty: Callable[[dict[str, Any]], bool], is_too_complex: Callable[[dict[str, Any]], bool]
    ) -> tuple[str, dict[str, Any]] | None:
        """An innermost place whose document is faulty, and that document; None if there is none.

        Parts with an expression are checked too: the texts tried for the whole schema may never reach them.
        """
        parts = {json.dumps(self._schemas[path]): path for path in self._regexes}
        path: str | None = "#/$defs/0"
        if not is_faulty(self.document()):
            path = next((path for path in parts.values() if is_too_complex(self.document(path))), None)
            if path is None:
                return None
        while path is not None:
            found = path
            inner = [below for below in self._below[path] if isinstance(self._schemas[below], dict)]
            schema = self._schemas[path]
            if isinstance(schema, dict) and "$ref" in schema and (target := unquote(schema["$ref"])) not in parts:
                parts[target] = target
                inner.append(target)
            path = next((below for below in inner if is_faulty(self.document(below))), None)
        for where, regex in self._regexes.get(found, {}).items():
            if is_faulty(alone := {"type": "string", "pattern": regex}):
                return where, alone
        return self._shown[found], self.document(found)

    def in_users_words(self, said: str) -> str:
        """llguidance's message with the user's places."""
        return _PATH.sub(lambda found: self._shown.get(unquote(found[0]), "a part of it"), said)

    def _check(self, schema: Any, path: str, place: str) -> Any:
        """The schema in llguidance's form; notes it and all schemas in it."""
        self._below[path] = []
        self._shown[path] = place = schema.place if isinstance(schema, Made) else self._references.place(schema, place)
        if isinstance(schema, bool):
            checked: Any = schema
        elif isinstance(schema, dict):
            checked = self._check_object(schema, path, place)
        else:
            raise UsageError(f"{self.name}: {place} is a JSON {_type(schema)}, expected a schema, an object")
        self._schemas[path] = checked
        return checked

    def _check_object(self, schema: dict[str, Any], path: str, place: str) -> dict[str, Any]:
        is_users = self._references.place(schema, "") != ""
        if is_users:
            for keyword in schema:
                self._check_keyword(keyword, schema, place)
        plain = rewritten(self.name, schema, place, self._references)

        def inner(one: Any, *parts: str) -> Any:
            way = "".join(f"/{keywords.escaped(part)}" for part in parts)
            self._below[path].append(path + way)
            return self._check(one, path + way, place + way if is_users else place)

        checked: dict[str, Any] = {}
        patterns = []
        for keyword, value in plain.items():
            where = f"{place}/{keywords.escaped(keyword)}"
            if keyword not in keywords.HELD or keyword in ("$defs", "definitions"):
                continue
            if keyword in keywords.NAMED:
                held = {name: inner(one, keyword, name) for name, one in value.items()}
                if keyword == "patternProperties":
                    names = [self._check_regex(name, f"{where}/{keywords.escaped(name)}", path) for name in held]
                    held = dict(zip(names, held.values(), strict=True))
                checked[keyword] = held
            elif keyword == "pattern":
                checked[keyword] = self._check_regex(value, where, path)
            elif keyword in keywords.LISTS:
                checked[keyword] = [inner(one, keyword, str(at)) for at, one in enumerate(value)]
            elif keyword in keywords.ONE:
                checked[keyword] = inner(value, keyword)
            elif keyword in ("$ref", "$dynamicRef"):
                target = self._references.target(plain if not is_users else schema)
                assert target is not None
                checked["$ref"] = _quoted(self._define(*target))
            elif keyword in ("const", "enum"):
                self._check_value(value, where)
                checked[keyword] = value
            elif keyword in keywords.BOUNDS:
                self._add_bound(checked, keyword, schema, where)
            elif keyword == "format":
                if value in keywords.PATTERNS:
                    patterns.append({"pattern": keywords.PATTERNS[value]})
                elif value in keywords.FORMATS:
                    checked[keyword] = value
                elif value in keywords.REFUSED_FORMATS:
                    known = ", ".join(keywords.FORMATS)
                    what = f"{keyword!r} at {place} is {value!r}, expected one of {known}, or a pattern"
                    raise UsageError(f"{self.name}: {what}")
            elif keyword in keywords.COUNTS and isinstance(value, float) and value.is_integer():
                checked[keyword] = int(value)
            else:
                checked[keyword] = value
        if patterns:
            checked["allOf"] = [*checked.get("allOf", []), *patterns]
        self._check_counts(schema, place)
        return checked

    def _define(self, place: str, schema: Any) -> str:
        if place not in self._definitions:
            self._definitions[place] = f"#/$defs/{len(self._definitions)}"
            self._named[place] = schema
        return self._definitions[place]

    def _check_regex(self, regex: Any, where: str, path: str) -> str:
        """An expression in llguidance's form; notes it for the schema at `path`."""
        written = as_in_json(f"{self.name}: {where}", regex)
        self._regexes.setdefault(path, {})[where] = written
        return written

    def _check_value(self, value: Any, where: str) -> None:
        """Refuse a value that llguidance would change. Keys are safe."""
        if isinstance(value, str) and (found := _DROPPED.search(value)):
            raise UsageError(f"{self.name}: {where} has the character U+{ord(found[0]):04X}; leave it out")
        if isinstance(value, int | float) and abs(value) > _MOST_EXACT:
            raise UsageError(f"{self.name}: {where} is {shown(value)}, expected -2**53 to 2**53, or a string")
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, one in inner:
            self._check_value(one, f"{where}/{keywords.escaped(str(name))}")

    def _add_bound(self, checked: dict[str, Any], keyword: str, schema: dict[str, Any], where: str) -> None:
        """Add a bound that llguidance does not round; in draft 4, true means that another bound is exclusive.

        Raises: UsageError for a bound that only larger numbers fit
        """
        bound, exclusive = schema[keyword], f"exclusive{keyword[:1].upper()}{keyword[1:]}"
        if isinstance(bound, bool):
            return
        if isinstance(bound, int | float):
            sign = 1 if keyword in ("maximum", "exclusiveMaximum") else -1
            if sign * bound <= -_MOST_EXACT:
                raise UsageError(f"{self.name}: {where} is {shown(bound)}: no number from -2**53 to 2**53 fits")
            bound = sign * _MOST_EXACT if sign * bound > _MOST_EXACT else bound
        checked[exclusive if schema.get(exclusive) is True else keyword] = bound

    def _check_keyword(self, keyword: str, schema: dict[str, Any], place: str) -> None:
        where, value = f"{self.name}: {keyword!r} at {place}", schema[keyword]
        if keyword not in keywords.HELD and keyword not in keywords.ANNOTATIONS and not keyword.startswith("x-"):
            hint = '; use "type": [..., "null"]' if keyword == "nullable" else ""
            if value not in (None, False):
                self._note(f"{keyword!r} at {place} is not of JSON Schema and binds nothing{hint}")
        what = f"{self.name}: {place}/{keyword} is a JSON {_type(value)}"
        is_list = keyword == "items" and isinstance(value, list)
        if keyword in (*keywords.NAMED, *keywords.LISTS) and not isinstance(
            value, dict if keyword in keywords.NAMED else list
        ):
            raise UsageError(f"{what}, expected {'an object' if keyword in keywords.NAMED else 'a list'} of schemas")
        if keyword in (*keywords.ONE, *keywords.UNEVALUATED) and not isinstance(value, dict | bool) and not is_list:
            raise UsageError(f"{what}, expected a schema, an object")
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is True:
            other = keyword.removeprefix("exclusive").lower()
            if other not in schema:
                raise UsageError(f"{where} is {value}, expected a number, the bound itself")
        if keyword == "required" and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
            raise UsageError(f"{where} is {shown(value)}, expected a list of keys")
        if keyword == "format" and not isinstance(value, str):
            raise UsageError(f"{where} is {shown(value)}, expected a string")
        if keyword == "format" and value not in (*keywords.FORMATS, *keywords.FREE_FORMATS, *keywords.REFUSED_FORMATS):
            self._note(f"'format' at {place} is {shown(value)}, which nobody knows, and binds nothing")
        if keyword == "prefixItems" and self._is_old:
            raise UsageError(f"{where} is of draft 2020-12, and $schema names an older one")

    def _note(self, what: str) -> None:
        if self._is_strict:
            raise UsageError(f"{self.name}: {what}; leave it out, or leave out --schema-strict")
        self._notes[what] = None

    def _check_counts(self, schema: dict[str, Any], place: str) -> None:
        """Refuse counts that could go wrong: unlisted keys may come twice, and then count as one."""
        least = schema.get("minProperties", 0)
        listed = set(schema.get("properties", {})) & set(schema.get("required", []))
        if isinstance(least, int | float) and least > len(listed) + 1:
            raise UsageError(
                f"{self.name}: 'minProperties' at {place} is {least}, and required properties are {len(listed)}; more "
                "than one other property cannot be counted exactly: list them in properties and required"
            )


def _is_old_draft(name: str, schema: Any) -> bool:
    """Whether the schema is of a draft before 2020-12. Raises: UsageError for an unknown draft"""
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    if draft is None:
        return False
    if not isinstance(draft, str) or not any(known in draft for known in _DRAFTS):
        raise UsageError(f"{name}: $schema is {draft!r}, expected JSON Schema draft 4, 6, 7, 2019-09 or 2020-12")
    return any(known in draft for known in _OLD_DRAFTS)


def _quoted(path: str) -> str:
    return quote(path, safe="#/~$")


def _type(value: object) -> str:
    return _JSON_TYPES.get(type(value), "null")
