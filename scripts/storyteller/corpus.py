"""The training corpus as a function of a seed: an endless, reproducible stream of documents."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from .dialogue import converse, small_talk
from .story import Story, tell

RAW_SHARE = 0.3
SMALL_TALK_SHARE = 0.03

# A document is a list of pieces (role, text); the role of a raw story is empty.
Document = list[tuple[str, str]]


def shard_random(seed: int, shard: int, split: str) -> Random:
    """The generator of one shard; shards and splits never share a stream."""
    return Random(f"{split}/{seed}/{shard}")


def document_with_stories(random: Random, split: str) -> tuple[Document, list[Story]]:
    """One document and the stories told in it."""
    roll = random.random()
    if roll < RAW_SHARE:
        story = tell(random, split)
        return [("", story.text)], [story]
    if roll < RAW_SHARE + SMALL_TALK_SHARE:
        return list(small_talk(random).messages()), []
    dialogue = converse(random, split)
    return list(dialogue.messages()), [turn.story for turn in dialogue.turns if turn.kind == "story"]


def documents(seed: int, shard: int, split: str = "train") -> Iterator[Document]:
    """All documents of a shard, without end."""
    random = shard_random(seed, shard, split)
    while True:
        yield document_with_stories(random, split)[0]
