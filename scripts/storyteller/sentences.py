"""Sentences of a text, and the same with names and things masked, so that two stories can be compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

from .grammar import words_of
from .things import COLOURS, LOOKS, MATERIALS

# Cries such as "Oh dear!" are nobody's own.
LEAST_WORDS = 4
_SENTENCE_END = re.compile(r'(?<=[.!?]) +(?=["A-Z])|(?<=[.!?]") +(?=["A-Z])|\n+')
_WORD = re.compile(r"[\w'-]+")
# A capital in the middle of a sentence marks a name, except in these.
_NAME = re.compile(r"(?<=[\w,;:-] )[A-Z][\w'-]*")
NOT_NAMES = frozenset(
    words_of("""
Once, I, I'm, I'll, I'd, I've, Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, January, February,
March, April, May, June, July, August, September, October, November, December""")
)


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences; a quoted sentence stays with the words that carry it."""
    return [part for part in _SENTENCE_END.split(text) if part]


def repeated_sentences(text: str) -> list[str]:
    """Sentences of four words or more that stand in a text more than once."""
    counts = Counter(sentence for sentence in sentences_of(text) if sentence.count(" ") >= LEAST_WORDS - 1)
    return [sentence for sentence, count in counts.items() if count > 1]


@cache
def _thing_pattern(thing: str) -> re.Pattern[str]:
    looks = "|".join(map(re.escape, sorted((*COLOURS, *MATERIALS, *LOOKS), key=len, reverse=True)))
    return re.compile(rf"(?<![\w-])(?:(?:{looks}) )?{re.escape(thing)}(?![\w-])", re.IGNORECASE)


def masked_sentences(text: str, thing: str = "") -> list[str]:
    """Sentences of four words or more in small letters without marks, each name and the thing replaced by a word.

    The thing's colour, material or look is masked with it.
    """
    if thing:
        text = _thing_pattern(thing).sub("thing", text)
    names = set(_NAME.findall(text)) - NOT_NAMES
    names |= {name.removesuffix("'s") for name in names}
    masked = []
    for sentence in sentences_of(text):
        words = ["name" if word.removesuffix("'s") in names else word.lower() for word in _WORD.findall(sentence)]
        # A name of two words is one name.
        words = [word for word, before in zip(words, ["", *words], strict=False) if not word == before == "name"]
        if len(words) >= LEAST_WORDS:
            masked.append(" ".join(words))
    return masked


def sentence_hash(sentence: str) -> int:
    """A hash of 64 bits that is the same in every process."""
    return int.from_bytes(blake2b(sentence.encode(), digest_size=8).digest(), "little")


def shared_sentences(stories: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each story, its masked sentences that another story has too."""
    counts = Counter(sentence for story in stories for sentence in set(story))
    return [[sentence for sentence in story if counts[sentence] > 1] for story in stories]
