"""Checks a regular expression: Python's `re` must read it, and read it as llguidance does."""

import re
import warnings

from llmcli.errors import UsageError


def check_regex(where: str, regex: object) -> None:
    """Raises: UsageError for what `re` does not read, or llguidance would read in another way"""
    if not isinstance(regex, str):
        raise UsageError(f"{where} is {regex!r}, expected a regular expression")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets in sets, which llguidance has and Python has not
            re.compile(regex)
    except (re.error, FutureWarning, OverflowError, RecursionError) as error:
        raise UsageError(f"{where} is {regex!r:.100}, no regular expression: {error}") from error


# A bracket expression. `check_regex` has refused sets in sets.
_SET = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.S)
# Control characters that JSON has no letter for, so that our texts do not have them.
_UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f"


def as_in_json(where: str, regex: str) -> str:
    r"""An expression that llguidance applies to JSON strings as the given one applies to their values.

    llguidance lets `\"` and `\\` pass a set that has all control characters, but not these two. So a set loses those
    control characters that no text has anyway.
    Raises: UsageError for an expression in verbose form, whose comments may look like sets.
    """
    check_regex(where, regex)
    if re.compile(regex).flags & re.VERBOSE:
        raise UsageError(f"{where} is {regex!r:.100}, expected no (?x)")
    return _SET.sub(lambda found: _written(found[0]), regex)


def _written(part: str) -> str:
    return part if part.startswith("\\") else rf"[{part}&&[^{_UNWRITTEN}]]"
