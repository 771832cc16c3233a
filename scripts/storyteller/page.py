"""A story while it is written, with how surprising its words are: asides go where a passage is always the same.

A run of 25 words must not turn up in two stories. The chance of it is known, because every choice of the grammar has a
known weight: where the choices of a run come to too few bits, a sentence of many choices is put between.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .grammar import Mark

RUN_WORDS = 25
# A run of fewer bits asks for an aside. More bits would be better against repetition and worse to read.
LEAST_BITS = 12.0
MOST_ASIDES = 3
_WORD = re.compile(r"[\w'-]+")
# Between two sentences of narration: an aside would tear a conversation.
_JOINT = re.compile(r"(?<=[.!?]) (?=[A-Z])")


class Page:
    """Paragraphs of text with the marks of what was chosen."""

    def __init__(self) -> None:
        self._text = ""
        self._marks: list[Mark] = []
        self._gap = ""

    def add(self, text: str, marks: list[Mark]) -> None:
        """Put a passage behind what is there."""
        if not text.strip():
            return
        start = len(self._text) + len(self._gap)
        self._text += self._gap + text
        self._marks += [(start + at, bits, slot) for at, bits, slot in marks]
        self._gap = " "

    def break_paragraph(self) -> None:
        """Let the next passage begin a paragraph."""
        self._gap = "\n\n"

    def insert(self, at: int, text: str, marks: list[Mark]) -> None:
        """Put a sentence and a space before the character at an offset."""
        text += " "
        moved = [(where + len(text) if where > at else where, bits, slot) for where, bits, slot in self._marks]
        fresh = [(at + where, bits, slot) for where, bits, slot in marks]
        self._text = self._text[:at] + text + self._text[at:]
        self._marks = sorted(moved + fresh)

    def poor_runs(self) -> list[tuple[float, int, int]]:
        """The runs of 25 words with too few bits: bits, start and end of each, the poorest first.

        A slot of the story counts once in a run, however often it is named there.
        """
        words = list(_WORD.finditer(self._text))
        by_word: list[list[tuple[float, str]]] = [[] for _ in words]
        word = 0
        for at, bits, slot in self._marks:
            while word < len(words) - 1 and words[word].end() < at:
                word += 1
            by_word[word].append((bits, slot))
        total, named, poor = 0.0, dict.fromkeys((slot for _, _, slot in self._marks), 0), []
        for last, entering in enumerate(by_word):
            for bits, slot in entering:
                if not slot or not named[slot]:
                    total += bits
                named[slot] += 1
            first = last - RUN_WORDS + 1
            if first > 0:
                for bits, slot in by_word[first - 1]:
                    named[slot] -= 1
                    if not slot or not named[slot]:
                        total -= bits
            if first >= 0 and total < LEAST_BITS:
                poor.append((total, words[first].start(), words[last].end()))
        return sorted(poor)

    def enrich(self, tell_aside: Callable[[], tuple[str, list[Mark]]]) -> None:
        """Put asides between sentences, at the poorest runs first, until every run is rich enough or no more fit."""
        barred: set[int] = set()  # both ends of every aside: two do not stand side by side
        for _ in range(MOST_ASIDES):
            text = self._text
            joints = [match.end() for match in _JOINT.finditer(text)]
            joints = [at for at in joints if at not in barred and text.count('"', 0, at) % 2 == 0]
            places = (
                min(inside, key=lambda at: abs(2 * at - start - end))
                for _, start, end in self.poor_runs()
                if (inside := [at for at in joints if start < at < end])
            )
            at = next(places, None)
            if at is None:
                return
            self.insert(at, *tell_aside())
            growth = len(self._text) - len(text)
            barred = {place + growth if place >= at else place for place in barred} | {at, at + growth}

    def text(self) -> str:
        """The text, with single spaces."""
        text = self._text
        while "  " in text:
            text = text.replace("  ", " ")
        return text.replace(" \n", "\n")
