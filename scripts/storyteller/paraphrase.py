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

# A noun takes an adjective where no other noun stands behind it, as in `the door handle`.
_NO_COMPOUND = (
    r"(?=[.,;!?|\]\"]| (?:of|in|on|at|and|with|was|that|to|by|for|from|under|behind|over|beside|until|opened|had|as)\b)"
)
_TAGS = re.compile(r"(\{@(?:said|asked|cried)\}) \{(hero|pal|friend|elder)\}(?=[.,])")
_LATE_TAGS = re.compile(r"(\{(?:hero|pal|friend|elder|he)\} \{@(?:said|asked|cried)\})(?=[.,])")
_MANNER = "[||| {@softly}]"


def _compile_looks() -> tuple[re.Pattern[str], dict[str, str]]:
    looks = dict(line.split(": ") for line in read_text("adjectives.txt").splitlines())
    nouns = "|".join(sorted(looks, key=len, reverse=True))
    return re.compile(rf"\b([Tt]he|[Aa]) ({nouns}){_NO_COMPOUND}"), looks


def _compile_synonyms() -> tuple[re.Pattern[str], list[str]]:
    patterns, choices = [], []
    rows = [line.rpartition(": ") for line in read_text("synonyms.txt").splitlines()]
    # Longer phrases first, so that `at first` is not read as something shorter.
    for left, _, right in sorted(rows, key=lambda row: -len(row[0])):
        patterns.append(f"((?:{left})(?![\\w'-]))")
        choices.append(right)
    return re.compile(r"\{[^}]*\}|(?<![\w'-])(?:" + "|".join(patterns) + ")", re.IGNORECASE), choices


_PATTERN, _CHOICES = _compile_synonyms()
_NOUNS, _LOOKS = _compile_looks()


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

    def replace_tag(match: re.Match[str]) -> str:
        who = "[{hero}|{hero}|{hero}|the {kind}|the {who}]" if match[2] == "hero" else f"{{{match[2]}}}"
        return f"[{match[1]} {who}|{match[1]} {who}|{who} {match[1]}]{_MANNER}"

    def add_look(match: re.Match[str]) -> str:
        looks = _LOOKS[match[2]].split("|")
        return f"{match[1]} [{'|' * len(looks)}{' |'.join(looks)} ]{match[2]}"

    def replace_start(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()):
            return match.group()
        if match.group(2) == "{He}":
            return "[{He}|{He}|{He}|The {kind}|{The_who}|{@lead} {he}|{@lead} {hero}] "
        return "[{hero}|{hero}|The {kind}|{The_who}|{@lead} {hero}] "

    def replace_end(match: re.Match[str]) -> str:
        return "[.|.|.|.|.|.|{@tail}.]" if _is_narration(match.string, match.start()) else "."

    text = _TAGS.sub(replace_tag, _LATE_TAGS.sub(rf"\1{_MANNER}", text))
    text = _STARTS.sub(replace_start, text)
    return _NOUNS.sub(add_look, _PATTERN.sub(replace_word, _ENDS.sub(replace_end, text)))
