"""Reads facts back out of a teller's story, so that it can be asked about them."""

from __future__ import annotations

import re
from random import Random

from .creatures import FEELINGS, KINDS, PRONOUNS, TRAITS
from .dialogue import GENERAL_QUESTIONS, Turn
from .grammar import Values
from .things import COLOURS


def _one_of(words: tuple[str, ...]) -> str:
    return "|".join(re.escape(word) for word in sorted(set(words), key=len, reverse=True))


_WHO = re.compile(rf"\b(?:a|an|the) ({_one_of(TRAITS)}) ({_one_of(tuple(kind for kind, _ in KINDS))})\b")
_FEEL = re.compile(rf"\bfelt ({_one_of(FEELINGS)})\b")


def facts_of(text: str, name: str, thing: str) -> dict[str, str]:
    """What can be read from a story without doubt: who the hero is, the colour of the thing, the feeling at the end."""
    facts = {"name": name} if name and name in text else {}
    paragraphs = text.split("\n\n")
    # A lead-in may stand before the opening.
    if who := _WHO.search(next((paragraph for paragraph in paragraphs if name in paragraph), "")):
        facts |= {"trait": who[1], "kind": who[2]}
    if feel := _FEEL.search(paragraphs[-1]):
        facts["feel"] = feel[1]
    colours = set(re.findall(rf"\b({_one_of(COLOURS)}) {re.escape(thing)}\b", text)) if thing else set()
    if len(colours) == 1:
        facts["colour"] = colours.pop()
    return facts


def questions_about(random: Random, text: str, name: str, thing: str) -> list[Turn]:
    """Questions that a story answers, in random order."""
    facts = facts_of(text, name, thing)
    values = Values({**PRONOUNS["it"], **facts, "hero": name, "thing": thing})
    turns = [
        Turn("fact", values.fill(question.ask, random.random), "", question.key, facts[question.key])
        for question in GENERAL_QUESTIONS
        if question.key in facts and "kind" in facts
    ]
    random.shuffle(turns)
    return turns
