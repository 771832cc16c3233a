"""Compares stories with the training text sentence by sentence, names and things masked.

The training text is generated again from its seeds, so it need not be stored, and the comparison is exact.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from .corpus import document_with_stories, shard_random
from .sentences import masked_sentences, sentence_hash

_WORD = re.compile(r"[a-z]+")
# Documents whose words are taken for those of the training text: a word that is not in them is rare indeed.
WORD_LIST_DOCUMENTS = 6000


def _closest_in_shard(
    wanted: dict[int, list[int]], num_stories: int, seed: int, shard_and_size: tuple[int, int]
) -> list[int]:
    """For each story, the most of its sentences that one training story of a shard has."""
    shard, num_documents = shard_and_size
    random = shard_random(seed, shard, "train")
    most = [0] * num_stories
    for _ in range(num_documents):
        for story in document_with_stories(random, "train")[1]:
            shared: Counter[int] = Counter()
            for sentence in set(masked_sentences(story.text, story.facts["thing"])):
                shared.update(wanted.get(sentence_hash(sentence), ()))
            for index, count in shared.items():
                most[index] = max(most[index], count)
    return most


def closest_shares(stories: list[list[str]], manifest: Path, workers: int = 2) -> list[float]:
    """For each story, given as its masked sentences: the largest share of them that one training story has."""
    plan = json.loads(manifest.read_text())
    wanted: defaultdict[int, list[int]] = defaultdict(list)
    sizes = []
    for index, sentences in enumerate(stories):
        different = set(sentences)
        sizes.append(len(different))
        for sentence in different:
            wanted[sentence_hash(sentence)].append(index)
    with ProcessPoolExecutor(workers) as pool:
        scan = partial(_closest_in_shard, dict(wanted), len(stories), plan["seed"])
        shards = list(pool.map(scan, enumerate(plan["documents"])))
    return [max((shard[index] for shard in shards), default=0) / max(1, size) for index, size in enumerate(sizes)]


def words_in(text: str) -> list[str]:
    """The words of a text in small letters, cut at apostrophes and hyphens; anything but a to z parts words."""
    return _WORD.findall(text.lower())


def training_words(seed: int, num_documents: int = WORD_LIST_DOCUMENTS) -> set[str]:
    """Words of the first training documents, generated again, without what users typed."""
    random = shard_random(seed, 0, "train")
    words: set[str] = set()
    for _ in range(num_documents):
        for role, text in document_with_stories(random, "train")[0]:
            if role in ("", "assistant"):
                words.update(words_in(text))
    return words
