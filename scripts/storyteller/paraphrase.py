"""Loosens the wording of a plot: synonyms, contractions, leads before a sentence and tails behind it.

It works on the template text once, when the plots are loaded, so telling a story costs nothing more. A word on the
left side of `text/synonyms.txt` may be told as any on the right; each row holds only what fits wherever it is used.
"""

from __future__ import annotations

import re

from .grammar import capitalise
from .phrases import read_text

_PLAIN_VERBS = (
    r"\w+ed went ran took put held sat stood came got gave told made tried thought found felt saw heard began wrote "
    "fell drew hid rang rode kept let lay knew bent dug set threw left ate woke swung crept spoke"
)
_PLAIN_VERB = rf"(?:{'|'.join(_PLAIN_VERBS.split())})\b(?! not)"
_STARTS = re.compile(r'(^|(?<=[.!?] )|(?<=[.!?]" ))(\{He\}|\{hero\}) (?=' + _PLAIN_VERB + ")")
_ENDS = re.compile(r"(?<=[a-z}\]])\.(?= |$)")


def _compile_synonyms() -> tuple[re.Pattern[str], list[str]]:
    patterns, choices = [], []
    rows = [line.rpartition(": ") for line in read_text("synonyms.txt").splitlines()]
    # Longer phrases first, so that `at first` is not read as something shorter.
    for left, _, right in sorted(rows, key=lambda row: -len(row[0])):
        patterns.append(f"((?:{left})(?![\\w'-]))")
        choices.append(right)
    return re.compile(r"\{[^}]*\}|(?<![\w'-])(?:" + "|".join(patterns) + ")", re.IGNORECASE), choices


_PATTERN, _CHOICES = _compile_synonyms()


def _is_narration(text: str, at: int) -> bool:
    """Tell whether a position lies outside speech."""
    return text.count('"', 0, at) % 2 == 0


def loosen(text: str) -> str:
    """Turn one telling of a beat into a template with many more wordings."""

    def replace_word(match: re.Match[str]) -> str:
        word = match.group()
        if word.startswith("{"):
            return word
        right = _CHOICES[match.lastindex - 1]
        if "{" in right and not text[: match.start()].rstrip().lower().endswith(("{he}", "{hero}")):
            right = "|".join(choice for choice in right.split("|") if "{" not in choice)
        if word[0].isupper() and word[:2] != "I ":
            right = "|".join(capitalise(choice) for choice in right.split("|"))
        return f"[{right}]"

    def replace_start(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()):
            return match.group()
        if match.group(2) == "{He}":
            return "[{He}|{He}|{He}|The {kind}|{@lead} {he}|{@lead} {hero}] "
        return "[{hero}|{hero}|The {kind}|{@lead} {hero}] "

    def replace_end(match: re.Match[str]) -> str:
        return "[.|.|.|.|.|.|{@tail}.]" if _is_narration(match.string, match.start()) else "."

    return _PATTERN.sub(replace_word, _ENDS.sub(replace_end, _STARTS.sub(replace_start, text)))
