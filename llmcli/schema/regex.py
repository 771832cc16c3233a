"""Checks a regular expression: Python's `re` must read it, and read it as llguidance does."""

import re
import warnings

from llmcli.errors import UsageError
from llmcli.schema.ecma import from_ecma, without_properties

# The parts of an expression that `re` has read: escapes, bracket expressions, counts, and by name those that llguidance
# reads, or may read, in another way.
_SET = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_PARTS = re.compile(
    rf"\\.|(?P<set>{_SET})|(?P<verbose>\(\?[aiLmsu]*x)|(?P<case>\(\?[aLmsu]*i)"
    r"|(?P<possessive>(?:[*+?]|\{[0-9,]+\})\+)"
    r"|\{[0-9,]+\}|(?P<brace>\{)",
    re.S,
)
# What llguidance has in sets and Python has not: sets, operations, and a first ] that begins no range.
_UNLIKE_IN_SET = re.compile(r"\[|&&|--|~~|^\^?\]-")
_REMEDIES = {
    "set": r"write \ before a [ & - ~ or ] in a set",
    "verbose": "write it without (?x)",
    "possessive": "write (?:...) around what the second mark repeats",
    "brace": r"write \{ for a brace that begins no count",
    "dotless": r"write \u0130\u0131 into the set: they are forms of i for Python alone",
}


def check_regex(where: str, regex: str, *, shown: str | None = None) -> None:
    """`shown` is what the user gave, if that is another one.

    Raises: UsageError for what `re` does not read, or llguidance would read in another way
    """
    shown = regex if shown is None else shown
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets in sets, which llguidance has and Python has not
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
    """Whether a set excludes these two only as forms of i, which they are for Python where case does not count."""
    return any(re.match(brackets, letter) and not re.match(brackets, letter, re.I) for letter in "\u0130\u0131")


def _is_unlike(brackets: str) -> bool:
    return _UNLIKE_IN_SET.search(re.sub(r"\\.", "_", brackets[1:-1], flags=re.S)) is not None


# Control characters that JSON has no letter for, and one that llguidance drops too: our strings do not have them.
UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f\x7f"
# Sets, and single characters that may be one of those. `check_regex` has refused sets in sets.
_NOT_ECMA = re.compile(r"(?s)^(?:\\.|[^\\])*?(?P<what>\\c(?![A-Za-z])|\\[AZz]|(?<!\\)\[\^?\])")
_CHARACTERS = re.compile(
    rf"{_SET}|\\?[{UNWRITTEN}]|\\(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}|[av])|(?P<other>\\.)", re.S
)


def as_in_json(where: str, regex: str) -> str:
    r"""An expression that llguidance applies to JSON strings as the given one, of ECMA-262, applies to their values.

    llguidance lets `\"` and `\\` pass a set that has all control characters, but not these two, and leaves out a
    control character that stands alone. So the expression loses those that no text has anyway.
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
