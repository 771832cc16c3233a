"""Judges of a story and of an answer: plain functions of text, by any author."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .grammar import words_of
from .sentences import repeated_sentences

_GENDERED = {"he": {"he", "him", "his", "himself"}, "she": {"she", "her", "hers", "herself"}}
_WORD = re.compile(r"[\w'-]+")
_SMALL_WORDS = frozenset(
    words_of("""
a, an, the, of, in, on, at, by, to, and, or, with, from, for, was, were, is, are, it, its, his, her, their,
that, which, who, this, as, near, next, one, under, over, into, out, up, down, behind, beside, between, among,
inside, no, so, be""")
)
_TWICE = re.compile(r"\b([A-Za-z]+) \1\b")
_IMAGE = re.compile(r"\blike (?:an?|the|[a-z]+s)\b|\bas [\w-]+ as (?:an?|the|if)\b|\bas (?:if|though)\b")
MOST_IMAGES = 3
# With fewer than this share of its words an answer says something else.
_ANSWER_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asked for; empty if the choice was left to the teller."""

    name: str = ""
    thing: str = ""
    pronoun: str = ""


def has_phrase(text: str, phrase: str) -> bool:
    """Tell whether a phrase stands in a text as whole words, capitals aside."""
    return re.search(rf"(?<![\w-]){re.escape(phrase)}(?![\w-])", text, re.IGNORECASE) is not None


def has_wish(text: str, wish: Wish) -> bool:
    """The requested name and thing appear."""
    return all(has_phrase(text, phrase) for phrase in (wish.name, wish.thing) if phrase)


def is_ended(text: str, is_finished: bool = True) -> bool:
    """The teller stopped by itself, after a whole sentence, every quotation closed, and with the closing paragraph.

    Every story of the grammar closes with how the hero felt: without that, a cut between two sentences goes unseen.
    """
    is_whole = text.rstrip()[-1:] in (".", "!", "?", '"') and text.count('"') % 2 == 0
    return is_finished and is_whole and has_phrase(text.rpartition("\n\n")[2], "felt")


def has_no_repeats(text: str) -> bool:
    """No sentence of four words or more stands there twice."""
    return not repeated_sentences(text)


def has_one_gender(text: str, pronoun: str = "") -> bool:
    """Pronouns agree with the hero; nobody else has a gendered one in these stories.

    Where the request leaves the pronoun open, the story must only keep to one.
    """
    words = set(_WORD.findall(text.lower()))
    used = {gender for gender, forms in _GENDERED.items() if words & forms}
    return used <= {pronoun} if pronoun else len(used) < 2


def stumbles(text: str) -> list[str]:
    """Words that stand twice in a row: `has seen seen`. Two of them are English: `had had`, `that that`."""
    return [match[0] for match in _TWICE.finditer(text) if match[1].lower() not in ("had", "that")]


def num_images(paragraph: str) -> int:
    """How often a paragraph compares one thing with another: `like a`, `as ... as`, `as if`."""
    return len(_IMAGE.findall(paragraph))


def has_few_images(text: str) -> bool:
    """No paragraph has more than three comparisons."""
    return all(num_images(paragraph) <= MOST_IMAGES for paragraph in text.split("\n\n"))


def content_words(text: str) -> list[str]:
    """The words that carry meaning, in lower case."""
    words = (word.removesuffix("'s") for word in _WORD.findall(text.lower()))
    return [word for word in words if word not in _SMALL_WORDS]


def is_right(answer: str, value: str) -> bool:
    """The answer says the value: a short one word for word, a long one nearly so; yes and no come first."""
    if value in ("yes", "no"):
        return answer.lower().startswith(value)
    wanted, said = content_words(value), set(content_words(answer))
    if not wanted:
        return value.lower() in answer.lower()
    share = sum(word in said for word in wanted) / len(wanted)
    return share == 1 if len(wanted) < 5 else share >= _ANSWER_SHARE


def judge_story(text: str, wish: Wish, is_finished: bool = True) -> dict[str, bool]:
    """All verdicts on one story."""
    return {
        "wish": has_wish(text, wish),
        "ended": is_ended(text, is_finished),
        "no repeats": has_no_repeats(text),
        "pronouns": has_one_gender(text, wish.pronoun),
        "no stumbles": not stumbles(text),
        "few images": has_few_images(text),
    }
