"""Texts that do not begin as a story does: so the model finds its way back to plain English from any prompt.

A piece of the role "given" is what somebody typed. It is read and not learned, so strange text is never generated.
"""

from __future__ import annotations

import string
from random import Random

from .casting import Asked
from .grammar import Values, capitalise, fix_articles
from .names import everyday_words, invent_word
from .phrases import POOLS, read_text
from .story import Story, tell

Document = list[tuple[str, str]]

_FRAGMENTS, _FOREIGN, _QUESTIONS = (
    tuple(read_text(f"strange/{name}.txt").splitlines()) for name in ("fragments", "foreign", "questions")
)
_BRIDGES = {
    name: POOLS.parse(f"{{@{name}}}") for name in ("torn", "torn2", "after_and", "cut", "oneword", "asked_this")
}
# A clause follows these; anything but a stop follows those.
_JOINERS = ("and", "and", "and", "but", "so", "then", "when", "because")
_OPEN_WORDS = ("the", "a", "of", "to", "with", "in", "my", "his", "that", "is", "was", "had", "for", "very")
_PAGES = [POOLS.parse("{@diary}"), POOLS.parse("{@letter}")]
_RARE_CHARACTERS = "àéîõüßçñøåþðłžšćœæΩλжщдאבغ中文日本語の한국어ไทยहि€£¥§©™°±²½“”‘’–—…•★☃😀🎉🚀"
_WRITTEN = string.ascii_letters + string.digits + string.punctuation


def _words(random: Random) -> str:
    """Unrelated words, some of them misspelled."""
    words = []
    for _ in range(random.randint(2, 9)):
        word = invent_word(random) if random.random() < 0.15 else random.choice(everyday_words())
        if random.random() < 0.1:
            at = random.randrange(len(word))
            word = word[:at] + random.choice(string.ascii_lowercase) + word[at + random.randrange(2) :]
        words.append(word)
    text = " ".join(words)
    roll = random.random()
    return text.upper() if roll < 0.05 else capitalise(text) if roll < 0.6 else text


def _characters(random: Random) -> str:
    """Characters in no order, some of them never seen in a story."""
    from_set = _RARE_CHARACTERS if random.random() < 0.4 else _WRITTEN
    return "".join(random.choice(from_set + "  ") for _ in range(random.randint(1, 14))).strip() or "?"


def _strange_text(random: Random) -> str:
    """Input of somebody who does not know what the model can do."""
    roll = random.random()
    if roll < 0.3:
        text = random.choice(_FRAGMENTS)
    elif roll < 0.45:
        text = random.choice(_FOREIGN)
    elif roll < 0.75:
        text = _words(random)
    elif roll < 0.85:
        text = _characters(random)
    else:
        text = f"{random.choice(_FRAGMENTS)} {_words(random).lower()}"
    if random.random() < 0.25 and len(text) > 8:
        text = text[: random.randrange(4, len(text))]
    if random.random() < 0.3:
        return f"{text.rstrip(' .,!?')} {random.choice(_JOINERS if random.random() < 0.6 else _OPEN_WORDS)}"
    return text + random.choice(("", "", "", "", ".", "!", ",", " "))


def _bridge_after(given: str) -> str:
    """The pool of sentences that turn a strange text into a story: whole, open for a clause, or cut before a word."""
    last = given.split()[-1].lower() if given.strip() else ""
    if given.rstrip()[-1:] in tuple(".!?…:;)]}"):
        return "torn2"
    if last in _JOINERS:
        return "after_and"
    return "cut" if last in _OPEN_WORDS or last.endswith(",") else "torn"


def _bridge(story: Story, name: str, given: str, random: Random) -> str:
    """A sentence of a pool that follows what was given, with a space where a word begins it or a comma follows."""
    sentence = fix_articles(Values(story.values).fill(_BRIDGES[name], random.random)).strip()
    is_joined = given[-1] == " " or (sentence[0] in ",.!?" and given[-1] != ",")
    return sentence if is_joined else f" {sentence}"


def strange_beginning(random: Random, split: str) -> tuple[Document, Story]:
    """Strange text, one sentence that leads from it, and a story."""
    story = tell(random, split)
    roll = random.random()
    if roll < 0.55:
        given = _strange_text(random)
        bridge = _bridge(story, _bridge_after(given), given, random)
    elif roll < 0.75:
        given = random.choice(_QUESTIONS)
        bridge = _bridge(story, "asked_this", given, random)
    else:
        given = random.choice((capitalise(random.choice(everyday_words())), invent_word(random), _words(random)))
        bridge = _bridge(story, "oneword", given, random)
    return [("given", given), ("", f"{bridge}\n\n{story.text}")], story


def middle_beginning(random: Random, split: str) -> tuple[Document, Story]:
    """A story from a random point on: a sentence, a word, or the middle of a word; what was typed is not learned."""
    story = tell(random, split)
    text = story.text
    start = random.randrange(len(text) * 2 // 3)
    if random.random() < 0.6:  # at the beginning of a sentence
        start = max(text.rfind(". ", 0, start) + 2, text.rfind("\n\n", 0, start) + 2) if start > 40 else 0
    else:
        start = text.find(" ", start) + 1
    end = start + random.randrange(1, 60)
    if random.random() < 0.7:  # after a whole word, or with the space that follows it
        end = text.find(" ", end) + (random.random() < 0.15)
    end = max(start + 1, min(end, len(text) - 1))
    return [("given", text[start:end]), ("", text[end:])], story


def name_beginning(random: Random, split: str) -> tuple[Document, Story]:
    """A bare name, or who somebody is, and the story of them."""
    story = tell(random, split, asked=Asked(name=True))
    facts = story.facts
    given = random.choice((facts["name"], facts["name"], f"{facts['name']} the {facts['kind']}",
                           f"{facts['name']} and the {facts['thing']}"))  # fmt: skip
    return [("given", given), ("", f"\n\n{story.text}")], story


def page(random: Random, split: str) -> tuple[Document, Story]:
    """A page of a diary, or a letter."""
    story = tell(random, split)
    text = fix_articles(Values(story.values).fill(random.choice(_PAGES), random.random)).replace("¶", "\n\n")
    return [("", text)], story
