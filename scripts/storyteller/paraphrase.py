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

# A noun takes an adjective where no other noun stands behind it, as in `the door handle`.
_NO_COMPOUND = (
    r"(?=[.,;!?|\]\"]| (?:of|in|on|at|and|with|was|that|to|by|for|from|under|behind|over|beside|until|opened|had|as|"
    r"but|were|again|so|or|if|would|could|did|before|after|against|across|through|just|not|which|who|he|she|they|\w+ed|into|"
    r"out|up|down|like|where|when|while|went|came|stood|lay|said|till|too|there|than)\b)"
)
_OWNERS = r"the|an?|two|three|four|every|each|another|some|\w+'s|his|her|its|their|my|your|our|one|\{his\}"
# A speaker is named with `said` or another word for it, wherever the plots say plainly `said`.
_SAID = re.compile(r"\bsaid\b(?= \{)|(?<=[,!?]\" \{\w\} )said\b(?=[.,])")
_TAGS = re.compile(r"(\{@(?:said|asked|cried)\}) \{(hero|pal|friend|elder)\}(?=[.,])")
_LATE_TAGS = re.compile(r"(\{(?:hero|pal|friend|elder|he)\} \{@(?:said|asked|cried)\})(?=[.,])")
_MANNER = "[|| {@softly}]"


def _compile_looks() -> tuple[re.Pattern[str], dict[str, str]]:
    """Which nouns take an adjective, and the pool of adjectives of each."""
    pools = {}
    for line in read_text("adjectives.txt").splitlines():
        nouns, _, pool = line.partition(": ")
        pools.update(dict.fromkeys(nouns.split(), pool))
    nouns = "|".join(sorted(pools, key=len, reverse=True))
    plurals = "|".join(noun for noun in pools if noun.endswith("s"))
    return re.compile(
        rf"\b(?:(?:{_OWNERS}) (?P<one>{nouns})|(?:with|of|from|and|in|on|many) (?P<more>{plurals})){_NO_COMPOUND}",
        re.IGNORECASE,
    ), pools


def _compile_synonyms() -> tuple[re.Pattern[str], list[str]]:
    patterns, choices = [], []
    rows = [line.rpartition(": ") for line in read_text("synonyms.txt").splitlines()]
    # Longer phrases first, so that `at first` is not read as something shorter.
    for left, _, right in sorted(rows, key=lambda row: -len(row[0])):
        patterns.append(f"((?:{left})(?![\\w'-]))")
        choices.append(right)
    return re.compile(r"\{[^}]*\}|(?<![\w'-])(?:" + "|".join(patterns) + ")", re.IGNORECASE), choices


_PATTERN, _CHOICES = _compile_synonyms()
# Where an adjective fits, and the pool that each noun draws from.
NOUNS, LOOKS = _compile_looks()


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
        noun = match["one"] or match["more"]
        return f"{match[0][: -len(noun)]}[|||{{@{LOOKS[noun.lower()]}}} ]{noun}"

    def replace_start(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()):
            return match.group()
        if match.group(2) == "{He}":
            return "[{He}|{He}|{He}|The {kind}|{The_who}|{@lead} {he}|{@lead} {hero}] "
        return "[{hero}|{hero}|The {kind}|{The_who}|{@lead} {hero}] "

    text = _SAID.sub("{@said}", text)
    text = _TAGS.sub(replace_tag, _LATE_TAGS.sub(rf"\1{_MANNER}", text))
    text = _STARTS.sub(replace_start, text)
    return NOUNS.sub(add_look, _PATTERN.sub(replace_word, text))
