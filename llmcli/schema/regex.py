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
