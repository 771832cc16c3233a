"""A story while it is written, with how surprising its words are: details go where the wording is always the same.

A run of 25 words must not turn up in two stories. The chance of it is known, because every choice of the grammar has a
known weight: where the choices of a run come to too few bits, a phrase of many choices is put in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .grammar import Mark, words_of
from .paraphrase import LOOKS, NOUNS

RUN_WORDS = 25
# Among n training stories of one shape a run is found again n / 2**bits times: here, with 10,000, once in a million.
LEAST_BITS = 33.0
POOR_BITS = 26.0
# The opening says who the hero is: nobody else is described before.
OPENING_WORDS = 14
# Two details do not stand side by side.
_APART_WORDS = 2
_WORD = re.compile(r"[\w'-]+")
_SPACES = re.compile(r" {2,}")
_IRREGULAR = (
    "(?:went|ran|took|put|sat|gave|began|wrote|drew|hid|rang|rode|bent|dug|set|threw|crept|told|came|brought|held)"
)
_ACTION = (
    rf"(?:[a-z]+ed|{_IRREGULAR})\b(?<!looked)(?<!seemed)(?<!turned)"
    r"(?<!needed)(?<!wanted)(?<!liked)(?<!loved)(?<!called)(?<!belonged)(?<!happened)(?<!appeared)(?<!\bused)(?! not)"
)
# A detail between commas stands before one of these words, but not behind one of the others.
_CLAUSE = "and|but|when|where|who|while|until|because|if|before|after|with|without"
_LOOSE = words_of("""
the, an, a, and, but, was, were, had, has, is, are, be, than, that, what, who, just, not, out, even, only, ever, then,
for, how, all, its, his, her, too, very, much, more, no, as, so, if, or, of, to, in, on, at, by, with, from, like, when,
where, such, one, some, any""")
# Before these it reads less well: only where a run has next to no choice.
_LAST_CLAUSE = "so|that|which|as|in|on|at|by|through|over|into|from|for|about|than|across|along|around|between"
_LOOSE_ENDS = "".join(rf"(?<!\b{word})" for word in _LOOSE)
_JOINT = re.compile(
    # Between sentences; the end of one; a comma; a mark of speech; before a verb; between clauses.
    r"(?<=[.!?]) (?=[A-Z])|(?<=\w)[.?!](?=[\s\"]|$)"
    r"|(?<=\w),(?= (?:and|but|so|until|till|while|where|when|because|for|yet|"
    r"with|who|which|like|as|in|on|at|by|to|then|he|she|it|they|[A-Z]|\")|\")|(?P<list>(?<=\w),(?= ))|\""
    rf"|\b(?:he|she|it|they|who|(?!Wh|Th)[A-Z]\w+)(?: had)? (?={_ACTION})|\b(?:and|then) (?={_IRREGULAR}\b)"
    rf"|(?<=[a-z]){_LOOSE_ENDS}(?= (?:{_CLAUSE}|(?P<last>{_LAST_CLAUSE})) \w)"
)
_PRESENT = re.compile(r"\b(?:is|are|has|have|does|do|says|will|can|may|keeps|sits|goes|you|it's|isn't|looks|comes)\b")

# Tells a phrase of one of the kinds below, or an adjective of a pool.
TellDetail = Callable[[str], tuple[str, list[Mark]]]
# How many words a kind costs, more or less: an adjective is one.
COSTS = {
    "adverb": 2,
    "gesture": 3,
    "vocative": 4,
    "tail": 4,
    "midtail": 5,
    "parenthesis": 8,
    "exclaim": 7,
    "aside": 9,
    "address": 9,
}


@dataclass(slots=True)
class Place:
    """A place in the text where a detail fits: character offset, index of the word before it, what fits,
    and whether it is a last resort."""

    at: int
    word: int
    kind: str
    is_last: bool = False


def find_places(
    text: str, words: list[re.Match[str]], fixed: Iterable[str] = (), opening_words: int = OPENING_WORDS
) -> list[Place]:
    """All places where a detail fits, in order; none is inside a phrase that is fixed."""
    places = [
        Place(match.end() - len(noun), 0, LOOKS[noun.lower()])
        for match in NOUNS.finditer(text)
        if (noun := match["one"] or match["more"])
    ]
    is_speech, is_tag, opened, stop = False, False, 0, 0
    for match in _JOINT.finditer(text):
        at = match.start()
        mark = match.group()
        kind = ""
        if mark == '"':
            is_speech = not is_speech
            opened = at
            if not is_speech:
                is_tag = text[at - 1] == "," or text[at + 2 : at + 3].islower()
            elif text[at + 1 : at + 2].isupper():
                at, kind = at + 1, "exclaim"
        elif mark == " ":
            stop = at
            if is_speech or text[at - 1] != '"':
                at, kind = at + 1, "exclaim" if is_speech else "aside"
        elif len(mark) > 1:
            is_told = is_tag and stop < opened and at - opened < 60
            at, kind = match.end(), "" if is_speech or is_told else "adverb"
        elif is_speech:
            kind = "vocative" if mark else "address"
        elif is_tag and stop < opened and at - opened < 60:
            if mark == "." or text[at + 2] == '"':
                kind = "gesture"
        elif mark not in ("?", "!") and text.count(" ", max(stop, opened), at) > 2:
            is_past = mark == "." and not _PRESENT.search(text, max(stop, opened), at)
            kind = "tail" if is_past else "midtail" if mark else "parenthesis"
        if kind:
            places.append(Place(at, 0, kind, bool(match["last"] or match["list"])))
    places.sort(key=lambda place: place.at)
    spans = []
    for phrase in fixed:
        at = text.find(phrase)
        while at >= 0:
            spans.append((at, at + len(phrase)))
            at = text.find(phrase, at + 1)
    word = -1
    for place in places:
        while word + 1 < len(words) and words[word + 1].start() < place.at:
            word += 1
        place.word = word
    return [
        place
        for place in places
        if place.word >= opening_words
        and not any(start < place.at < end or start == place.at and place.kind not in COSTS for start, end in spans)
    ]


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

    def _marks_by_word(self, words: list[re.Match[str]]) -> list[list[tuple[float, str]]]:
        by_word: list[list[tuple[float, str]]] = [[] for _ in words]
        word = 0
        for at, bits, slot in sorted(self._marks):
            while word < len(words) - 1 and words[word].end() < at:
                word += 1
            by_word[word].append((bits, slot))
        return by_word

    def run_bits(self) -> list[float]:
        """The bits of every run of 25 words; a slot of the story counts once in a run, however often it is named."""
        by_word = self._marks_by_word(list(_WORD.finditer(self._text)))
        return [_bits_of(by_word[first : first + RUN_WORDS]) for first in range(len(by_word) - RUN_WORDS + 1)]

    def enrich(self, tell_detail: TellDetail, fixed: Iterable[str] = (), opening_words: int = OPENING_WORDS) -> None:
        """Put details where they fit, from the beginning on, until every run is rich enough or no more fit.

        Phrases that are fixed stay as they are, and so do the opening words.
        """
        words = list(_WORD.finditer(self._text))
        by_word = self._marks_by_word(words)
        places = find_places(self._text, words, fixed, opening_words)
        put: list[tuple[int, str, list[Mark]]] = []
        first = 0
        while first + RUN_WORDS <= len(by_word):
            missing = LEAST_BITS - _bits_of(by_word[first : first + RUN_WORDS])
            if missing <= 0:
                first += 1
                continue
            inside = [
                place
                for place in places
                if first <= place.word < first + RUN_WORDS - 1
                and (not place.is_last or missing > LEAST_BITS - POOR_BITS)
            ]
            if not inside:
                first += 1
                continue
            # Late, so that the runs that follow gain too, but not so late that the detail lies outside.
            late = first + RUN_WORDS - 7
            place = min(
                inside, key=lambda place: COSTS.get(place.kind, 1) + abs(place.word - late) / 4 + 20 * place.is_last
            )
            text, marks = tell_detail(place.kind)
            put.append((place.at, text, marks))
            fresh = Page()
            fresh.add(text, marks)
            own_words = list(_WORD.finditer(text))
            by_word[place.word + 1 : place.word + 1] = fresh._marks_by_word(own_words)
            apart = _APART_WORDS if place.kind in COSTS else 1
            places = [other for other in places if abs(other.word - place.word) >= apart]
            for other in places:
                if other.word > place.word:
                    other.word += len(own_words)
        self._put(put)

    def _put(self, details: list[tuple[int, str, list[Mark]]]) -> None:
        """Put phrases before the characters at their offsets."""
        parts, done, shift = [], 0, 0
        marks, queue = [], sorted(self._marks)
        for at, text, own in sorted(details):
            parts += [self._text[done:at], text]
            while queue and queue[0][0] <= at:
                where, bits, slot = queue.pop(0)
                marks.append((where + shift, bits, slot))
            marks += [(at + shift + where, bits, slot) for where, bits, slot in own]
            done = at
            shift += len(text)
        marks += [(where + shift, bits, slot) for where, bits, slot in queue]
        self._text, self._marks = "".join([*parts, self._text[done:]]), marks

    def text(self) -> str:
        """The text, with single spaces."""
        return _SPACES.sub(" ", self._text).replace(" \n", "\n")


def _bits_of(run: list[list[tuple[float, str]]]) -> float:
    total, seen = 0.0, set()
    for word in run:
        for bits, slot in word:
            if not slot:
                total += bits
            elif slot not in seen:
                seen.add(slot)
                total += bits
    return total
