"""The training corpus as a function of a seed: an endless, reproducible stream of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

from .beginnings import Document, middle_beginning, name_beginning, page, strange_beginning
from .dialogue import converse, small_talk
from .story import Story, tell

# A document is a list of pieces (role, text); the role of a raw story is empty.
Made = tuple[Document, list[Story]]


def shard_random(seed: int, shard: int, split: str) -> Random:
    """The generator of one shard; shards and splits never share a stream."""
    return Random(f"{split}/{seed}/{shard}")


def _raw_story(random: Random, split: str) -> Made:
    story = tell(random, split)
    return [("", story.text)], [story]


def _conversation(random: Random, split: str) -> Made:
    dialogue = converse(random, split)
    return list(dialogue.messages()), [turn.story for turn in dialogue.turns if turn.kind == "story"]


def _small_talk(random: Random, split: str) -> Made:
    return list(small_talk(random).messages()), []


def _with_story(make: Callable[[Random, str], tuple[Document, Story]]) -> Callable[[Random, str], Made]:
    def made(random: Random, split: str) -> Made:
        document, story = make(random, split)
        return document, [story]

    return made


# How a document is made, and its share of all.
_MAKERS: tuple[tuple[Callable[[Random, str], Made], float], ...] = (
    (_conversation, 0.68),
    (_raw_story, 0.1),
    (_with_story(middle_beginning), 0.07),
    (_with_story(strange_beginning), 0.07),
    (_with_story(page), 0.025),
    (_small_talk, 0.025),
    (_with_story(name_beginning), 0.03),
)
_UP_TO = list(accumulate(share for _, share in _MAKERS))


def document_with_stories(random: Random, split: str) -> Made:
    """One document and the stories in it."""
    roll = random.random() * _UP_TO[-1]
    make = next(make for (make, _), limit in zip(_MAKERS, _UP_TO, strict=True) if roll <= limit)
    return make(random, split)


def documents(seed: int, shard: int, split: str = "train") -> Iterator[Document]:
    """All documents of a shard, without end."""
    random = shard_random(seed, shard, split)
    while True:
        yield document_with_stories(random, split)[0]
