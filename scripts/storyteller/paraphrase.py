"""Loosens the wording of a plot: synonyms, contractions, who is named how, sentences joined or parted.

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

# A speaker is named with `said` or another word for it, wherever the plots say plainly `said`.
_SAID = re.compile(r"\bsaid\b(?= \{)|(?<=[,!?]\" \{\w\} )said\b(?=[.,])")
_TAGS = re.compile(r"(\{@(?:said|asked|cried)\}) \{(hero|pal|friend|elder)\}(?=[.,])")
_LATE_TAGS = re.compile(r"(\{(?:hero|pal|friend|elder|he)\} \{@(?:said|asked|cried)\})(?=[.,])")
# How it was said; where the sentence ends there, the speaker may do something besides.
_MANNER, _LAST_MANNER = "[||| {@softly}]", "[|||| {@softly}| {@doing}]"


def _compile_synonyms() -> tuple[re.Pattern[str], list[str]]:
    patterns, choices = [], []
    rows = [line.rpartition(": ") for line in read_text("synonyms.txt").splitlines()]
    # Longer phrases first, so that `at first` is not read as something shorter.
    for left, _, right in sorted(rows, key=lambda row: -len(row[0])):
        patterns.append(f"((?:{left})(?![\\w'-]))")
        choices.append(right)
    return re.compile(r"\{[^}]*\}|(?<![\w'-])(?:" + "|".join(patterns) + ")", re.IGNORECASE), choices


_PATTERN, _CHOICES = _compile_synonyms()


# The second of two plain sentences may be joined to the first if it begins with one of these.
_JOINT = re.compile(
    r"(?<=[\w}\]])\. (?:(?P<he>\{He\}) (?=(?P<verb>" + _PLAIN_VERB + r")?)"
    r"|(?P<other>\{hero\}|\{friend\}|\{elder\}|\{Pal\}|\{The_thing\}|\{His\}|It|There|They|The|Nobody|Everybody) (?!is\b))"
)
_LONGEST = 14  # words of each of two sentences that are joined


def _is_open(text: str, at: int) -> bool:
    """Tell whether a position lies inside a bracket or inside speech."""
    return text.count("[", 0, at) > text.count("]", 0, at) or text.count('"', 0, at) % 2 == 1


def _join(text: str) -> str:
    """Let plain neighbouring sentences be joined now and then."""
    parts, done = [], 0
    last_joint = 0
    for match in _JOINT.finditer(text):
        start = max(text.rfind(stop, 0, match.start()) for stop in (". ", "! ", "? ", '" ')) + 1
        end = min((at for stop in ".!?" if (at := text.find(stop, match.end())) >= 0), default=len(text))
        before, after = text[max(start, 0) : match.start()], text[match.end() : end]
        is_plain = not any(mark in before + after for mark in '":;') and ", and " not in before and " is " not in before
        if (
            _is_open(text, match.start())
            or not is_plain
            or not before.strip()
            or start < last_joint
            or len(before.split()) > _LONGEST
            or len(after.split()) > _LONGEST
            or before.lstrip().startswith(("{@said", "{@asked", "{@cried", "said", "When", "If", "But when", "What", "How"))
        ):
            continue
        word = match["he"] or match["other"]
        small = word if word == "{hero}" or word[1:2].islower() and word[0] == "{" else (
            "{" + word[1].lower() + word[2:] if word[0] == "{" else word.lower()
        )
        joints = [f". {word} ", f". {word} ", f", and {small} "]
        if match["verb"]:
            joints += [" and ", f". Then {small} "]
        parts += [text[done : match.start()], "[" + "|".join(joints) + "]"]
        done = match.end()
        last_joint = match.start()
    return "".join([*parts, text[done:]])


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
        who = "[{hero}|{hero}|{hero}|the {kind}]" if match[2] == "hero" else f"{{{match[2]}}}"
        return f"[{match[1]} {who}|{match[1]} {who}|{who} {match[1]}]{manner_at(match)}"

    def manner_at(match: re.Match[str]) -> str:
        return _LAST_MANNER if match.string[match.end() :].startswith(".") else _MANNER

    def replace_start(match: re.Match[str]) -> str:
        if not _is_narration(match.string, match.start()):
            return match.group()
        if match.group(2) == "{He}":
            return "[{He}|{He}|{He}|{He}|{hero}|The {kind}] "
        return "[{hero}|{hero}|{hero}|The {kind}] "

    text = _join(text)
    text = _SAID.sub("{@said}", text)
    text = _TAGS.sub(replace_tag, _LATE_TAGS.sub(lambda match: match[1] + manner_at(match), text))
    text = _STARTS.sub(replace_start, text)
    return _PATTERN.sub(replace_word, text)
