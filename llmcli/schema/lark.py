"""Checks a grammar in Lark's syntax for what llguidance reads and we cannot hold: refused by line."""

import re

from llmcli.errors import UsageError

# Strings, expressions and comments, in which nothing is looked for.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')
_REFUSED = (
    (re.compile(r"^[ \t]*\??!?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\][ \t]*:", re.M), "a rule's options in brackets are"),
    (re.compile(r"<"), "a special token is"),
    (re.compile(r"%json\b"), "%json is"),
    (re.compile(r"@"), "another grammar is"),
    (re.compile(r"~(?![ \t]*[0-9])"), "~ for all that does not match, even bytes that are not text, is"),
)


def check_lark(name: str, text: str) -> None:
    """Raises: UsageError with the line"""
    bare = _QUOTED.sub(lambda match: "_" * len(match[0]), text)
    for pattern, what in _REFUSED:
        if found := pattern.search(bare):
            line = bare.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip())) + 1
            raise UsageError(f"{name}, line {line}: {what} not supported; write the rule without it")
