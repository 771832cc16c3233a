"""Regular expressions of ECMA-262, as JSON Schema has them, in what Python and llguidance read alike.

Classes have ECMA's meaning: `\\d` and `\\w` are ASCII, `\\s` is its white space, the dot all but line ends.
"""

import re

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
_PARTS = re.compile(
    rf"(?P<property>{_PROPERTY.pattern})|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{{2}})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{{2}})"
    r"|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\c(?P<control>[A-Za-z])|\\(?P<nul>0)(?![0-9])|\\(?P<kind>[sSdDwW])"
    r"|\\(?P<slash>/)|\\.|(?P<named>\(\?<(?![=!])[^>]*>)|(?P<begin>\[\^?)|(?P<end>\])|(?P<dot>\.)",
    re.S,
)


def from_ecma(regex: str) -> str:
    """The same expression; what is no part of ECMA-262 stays as it is."""
    is_in_set, written, last = False, "", 0
    for found in _PARTS.finditer(regex):
        written += regex[last : found.start()]
        last = found.end()
        kind = found.lastgroup
        if kind == "begin" and not is_in_set:
            is_in_set = True
        elif kind == "end":
            is_in_set = False
        written += _written(found, is_in_set)
    return written + regex[last:]


def without_properties(regex: str) -> str:
    """For Python, which has none: each stands for one letter."""
    return _PROPERTY.sub("a", regex)


def _written(found: re.Match[str], is_in_set: bool) -> str:
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
