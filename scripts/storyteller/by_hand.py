"""Judges stories told for wishes that were written by hand, in patterns that the grammar does not have.

`wishes_by_hand.txt` holds them: patterns apart by an empty line, each wish on a line with what it asks for after `=>`:
`Name (kind, kind; look look)` for each hero, name or kinds left out where the wish leaves them open.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .creatures import plural_of
from .names import BOYS, GIRLS, PET_NAMES
from .originality import words_in
from .phrases import read_text, text_names
from .sentences import NOT_NAMES
from .things import ORDINARY

_HERO = re.compile(r"([^(]*)\(([^;)]*)(?:; *([^)]*))?\)")
_NOUNS = r"(?P<nouns>(?:[\w'-]+ ){0,6}?[\w'-]+)"
_NAME = r"(?P<name>[A-Z][\w'-]*(?: [A-Z][\w'-]*)*)"
_DETERMINER = r"\b(?:[Aa]n?|[Tt]he|[Aa]nother|[Hh]is|[Hh]er|[Ii]ts|[Tt]heir)"
# How the grammar says what somebody is.
_DESCRIPTIONS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\b(?:[Aa]n?|[Aa]nother) {_NOUNS},? (?:named|called|whose name was) {_NAME}",
        rf"{_NAME}, {_DETERMINER} {_NOUNS}(?= (?:whom?|with|in|on|at|without|from|beside)\b|[,.;!?\"])",
        rf"{_NAME} (?:was|is) {_DETERMINER} {_NOUNS} who lived",
        rf"there (?:once )?lived {_DETERMINER} {_NOUNS}, and (?:his|her|its|their) name was {_NAME}",
        rf"the name of this {_NOUNS} was {_NAME}",
    )
)
# `Pip the red fox` says it too, but not every such place does: `handed Pip the lantern`.
_PERHAPS = re.compile(rf"{_NAME} (?:the|another) (?=(?P<nouns>[\w'-]+(?: [\w'-]+){{0,3}}))")
LEAST_MENTIONS = 2
_LOOK = re.compile(r"[\w'-]+")
# Characters of a story in which it says what the hero looks like.
_OPENING = 500


@dataclass(frozen=True, slots=True)
class Hero:
    """One that a wish asks for; what it leaves open is empty."""

    name: str = ""
    kinds: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HandWish:
    """A wish as somebody wrote it, and the one or two heroes of it."""

    pattern: int
    text: str
    heroes: tuple[Hero, ...]


def parse_hero(text: str) -> Hero:
    """Parse `Name (kind, kind; look look)`.

    Raises:
        ValueError: the text has no such form.
    """
    match = _HERO.fullmatch(text.strip())
    if not match:
        raise ValueError(f"not a hero: {text}")
    kinds = tuple(kind.strip() for kind in match[2].split(",") if kind.strip())
    return Hero(match[1].strip(), kinds, tuple((match[3] or "").split()))


@cache
def hand_wishes() -> tuple[HandWish, ...]:
    """All wishes of the file in its order."""
    text = Path(__file__).with_name("wishes_by_hand.txt").read_text(encoding="utf-8")
    wishes = []
    for pattern, block in enumerate(text.strip().split("\n\n")):
        for line in block.splitlines():
            wish, _, heroes = line.partition(" => ")
            wishes.append(HandWish(pattern, wish.replace("¶", "\n"), tuple(map(parse_hero, heroes.split(" + ")))))
    return tuple(wishes)


def descriptions(text: str) -> Iterator[tuple[int, str, str]]:
    """Where a text says what somebody is: position, name, and the words for what it is.

    A name of several words comes with its last word alone as well, as a sentence may begin before it.
    """
    for pattern in _DESCRIPTIONS:
        for match in pattern.finditer(text):
            last = match["name"].split()[-1]
            if last not in NOT_NAMES:
                yield match.start(), match["name"], match["nouns"]
                yield match.start(), last, match["nouns"]


def _is_of_kind(nouns: str, kinds: Collection[str]) -> bool:
    low = nouns.lower()
    return any(low == kind.lower() or low.endswith(f" {kind.lower()}") for kind in kinds)


def _may_be_of_kind(text: str, name: str, kinds: Collection[str]) -> bool:
    """`Pip the red fox` stands somewhere."""
    said = (f" {match['nouns'].lower()} " for match in _PERHAPS.finditer(text) if match["name"].split()[-1] == name)
    return any(f" {kind.lower()} " in nouns for nouns in said for kind in kinds)


def _mentions(text: str, name: str) -> int:
    return len(re.findall(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text))


def _is_told(text: str, hero: Hero, told: list[tuple[int, str, str]], taken: str = "") -> str:
    """The name under which a hero is told, or nothing: named often enough, of a right kind, and of no other."""
    perhaps = (match["name"].split()[-1] for match in _PERHAPS.finditer(text)) if taken else ()
    names = [hero.name] if hero.name else dict.fromkeys((*(name for _, name, _ in told), *perhaps))
    for name in names:
        if name == taken or _mentions(text, name) < LEAST_MENTIONS:
            continue
        kinds = [nouns for _, other, nouns in told if other == name]
        if not hero.kinds:
            # One kind and no other; the last word may stand for it.
            if len({nouns.split()[-1].lower() for nouns in kinds}) <= 1:
                return name
        elif all(_is_of_kind(nouns, hero.kinds) for nouns in kinds) and (
            kinds or _may_be_of_kind(text, name, hero.kinds)
        ):
            return name
    return ""


def judge_heroes(text: str, wish: HandWish) -> dict[str, bool]:
    """Whether the hero is the one wished for, whether both are, and whether the hero's looks are told.

    A single hero is also the first of whom the story says what it is.
    """
    told = sorted(descriptions(text))
    first = _is_told(text, wish.heroes[0], told)
    is_first = bool(told) and any(name == first for at, name, _ in told if at == told[0][0])
    verdicts = {"hero": bool(first) and (len(wish.heroes) > 1 or is_first)}
    if len(wish.heroes) > 1:
        verdicts["both heroes"] = bool(first) and bool(_is_told(text, wish.heroes[1], told, first))
    if looks := wish.heroes[0].looks:
        verdicts["looks"] = {look.lower() for look in looks} <= set(_LOOK.findall(text[:_OPENING].lower()))
    return verdicts


@cache
def listed_words() -> frozenset[str]:
    """The words of the grammar's text files and lists, cut as `words_in` cuts them."""
    folders = ("plots", "pools", "names", "strange")
    files = [name for folder in folders for name in text_names(folder)]
    files += ["feelings.txt", "traits.txt", "threads.txt", "synonyms.txt", "kinds.txt", "adjectives.txt", "roles.txt"]
    texts = [*map(read_text, files), *GIRLS, *BOYS, *PET_NAMES, *ORDINARY]
    return frozenset(word for text in texts for word in words_in(text))


def broken_words(text: str, wish: str, known: set[str]) -> list[str]:
    """Words that neither the training text, nor the wish, nor a list has; a plural of a word of the wish is one."""
    wished = set(words_in(wish))
    wished |= {plural_of(word) for word in wished} | {word.removesuffix(end) for word in wished for end in ("s", "es")}
    allowed = known | listed_words() | wished
    return [word for word in words_in(text) if not {word, word.removesuffix("s")} & allowed]
