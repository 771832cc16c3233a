"""Looks for long runs of words that a story shares with the training text, names and things masked.

The training text is told again from its seeds and compared window by window with the few stories in question, so the
search is exact and needs no memory for the corpus.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from .corpus import document_with_stories, shard_random
from .grammar import words_of

RUN_WORDS = 25
_WORD = re.compile(r"[\w'-]+")
# A capital in the middle of a sentence marks a name, except in these.
_NAME = re.compile(r"(?<=[\w,;:-] )[A-Z][\w'-]*")
_NOT_NAMES = frozenset(
    words_of("""
I, I'm, I'll, I'd, I've, Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, January, February,
March, April, May, June, July, August, September, October, November, December""")
)
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_MAX_WORDS = 1 << 13


def masked_words(text: str, things: tuple[str, ...] = ()) -> list[str]:
    """Words of a text in lower case, with names and the given things replaced by one word each."""
    for thing in sorted(filter(None, things), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(thing)}(?![\w-])", "thing", text, flags=re.IGNORECASE)
    names = set(_NAME.findall(text)) - _NOT_NAMES
    names |= {name.removesuffix("'s") for name in names}
    words = ["name" if word.removesuffix("'s") in names else word.lower() for word in _WORD.findall(text)]
    # A name of two words is one name.
    return [word for word, before in zip(words, ["", *words], strict=False) if not word == before == "name"]


@cache
def _word_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):
        base = np.full(_MAX_WORDS, _BASE, dtype=np.uint64)
        inverse = np.full(_MAX_WORDS, pow(_BASE, -1, 1 << 64), dtype=np.uint64)
        base[0] = inverse[0] = 1
        return np.cumprod(base), np.cumprod(inverse)


def run_hashes(words: list[str]) -> np.ndarray:
    """Hash of every run of 25 words: [len(words) - 24] uint64."""
    if len(words) < RUN_WORDS:
        return np.empty(0, dtype=np.uint64)
    words = words[: _MAX_WORDS - 1]
    powers, inverses = _powers()
    hashes = np.array([_word_hash(word) for word in words], dtype=np.uint64)
    with np.errstate(over="ignore"):
        sums = np.concatenate(([np.uint64(0)], np.cumsum(hashes * powers[: len(words)], dtype=np.uint64)))
        return (sums[RUN_WORDS:] - sums[:-RUN_WORDS]) * inverses[: len(words) - RUN_WORDS + 1]


def _scan_shard(wanted: np.ndarray, seed: int, shard_and_size: tuple[int, int]) -> np.ndarray:
    """The wanted hashes that one shard of training text contains."""
    shard, num_documents = shard_and_size
    random = shard_random(seed, shard, "train")
    hits: set[int] = set()
    for _ in range(num_documents):
        document, stories = document_with_stories(random, "train")
        things = tuple(story.facts["thing"] for story in stories)
        for role, text in document:
            if role not in ("user", "system"):
                hashes = run_hashes(masked_words(text, things))
                places = np.searchsorted(wanted, hashes)
                found = hashes[wanted[np.minimum(places, len(wanted) - 1)] == hashes]
                hits.update(found.tolist())
    return np.array(sorted(hits), dtype=np.uint64)


def shared_runs(texts: list[tuple[str, tuple[str, ...]]], manifest: Path, workers: int = 2) -> list[list[str]]:
    """For each (text, its things): the runs of 25 words that the training text of a manifest also has."""
    plan = json.loads(manifest.read_text())
    words = [masked_words(text, things) for text, things in texts]
    hashes = [run_hashes(story) for story in words]
    wanted = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)
    if not len(wanted):
        return [[] for _ in texts]
    with ProcessPoolExecutor(workers) as pool:
        scan = partial(_scan_shard, wanted, plan["seed"])
        found = np.concatenate(list(pool.map(scan, enumerate(plan["documents"]))))
    return [
        [" ".join(story[at : at + RUN_WORDS]) for at in np.flatnonzero(np.isin(own, found))]
        for story, own in zip(words, hashes, strict=True)
    ]
