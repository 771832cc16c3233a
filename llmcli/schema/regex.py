"""Regular expressions of ECMA-262 and of Python, checked and written so that llguidance reads them alike."""

import re
import warnings

from llmcli.errors import UsageError

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


def without_properties(regex: str) -> str:
    """For Python, which has no properties: one letter stands for each."""
    return _PROPERTY.sub("a", regex)


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
    check_regex(where, without_properties(ours), shown=regex)
    return _CHARACTERS.sub(lambda found: found[0] if found["other"] else _written(found[0]), ours)


def _written(characters: str) -> str:
    return rf"[{characters}&&[^{UNWRITTEN}]]"
