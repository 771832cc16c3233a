"""The template language of the story grammar: parse once, render many times.

`[a|b|c]` picks one alternative, `{slot}` inserts a value of this story, `{@pool}` picks from a shared pool.
A slot may carry a form: `{a_slot}` and `{the_slot}` add an article, a capital first letter capitalises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

# Written with a vowel, spoken with a consonant, and the other way round.
_CONSONANT_SOUND = ("uni", "use", "usu", "eu", "one", "ukulele")
_VOWEL_SOUND = ("hour", "honest", "heir")
# Pools are drawn after an article is written, so the article is set right at the end.
_ARTICLE = re.compile(
    r"\b([Aa])(?: (?=[aeiou]|hour|honest|heir)(?!uni|one|use|usu|eu|uku)|n (?=[^aeiouAEIOU])(?!hour|honest|heir))"
)
_MARKS = re.compile(r"[\[\]|{]")

Node = "str | Slot | Choice | tuple[list[Node]]"  # a pool is a tuple of its one sequence


def with_article(phrase: str) -> str:
    """Put `a` or `an` before a phrase, by its sound."""
    low = phrase.lower()
    is_vowel = low[:1] in "aeiou" and not low.startswith(_CONSONANT_SOUND) or low.startswith(_VOWEL_SOUND)
    return f"an {phrase}" if is_vowel else f"a {phrase}"


def fix_articles(text: str) -> str:
    """Set every `a` and `an` right for the word after it."""
    return _ARTICLE.sub(lambda match: match[1] + (" " if match[0].endswith("n ") else "n "), text)


def capitalise(phrase: str) -> str:
    """Raise the first letter and leave the others, unlike str.capitalize."""
    return phrase[:1].upper() + phrase[1:]


class Slot:
    """A place in a template that the story fills: a value by name, with an article or a capital."""

    __slots__ = ("article", "is_capital", "key", "name")

    def __init__(self, text: str) -> None:
        self.key = text
        self.is_capital = text[0].isupper()
        name = text[0].lower() + text[1:]
        self.article = ""
        for article in ("a", "the"):
            if name.startswith(article + "_"):
                self.article, name = article, name[len(article) + 1 :]
        self.name = name

    def shape(self, value: str) -> str:
        """Apply the article and the capital to a value."""
        if self.article == "a":
            value = with_article(value)
        elif self.article == "the":
            value = "the " + value
        return capitalise(value) if self.is_capital else value


class Choice:
    """Alternatives of equal weight."""

    __slots__ = ("options",)

    def __init__(self, options: list[list]) -> None:
        self.options = options


class Pools:
    """Named sets of alternatives that any template may draw from with `{@name}`."""

    def __init__(self) -> None:
        self._choices: dict[str, list] = {}

    def add(self, text: str) -> None:
        """Add pools from lines `name: a|b|c`; an indented line continues the line above it.

        Raises:
            ValueError: a pool is defined twice.
        """
        merged: dict[str, str] = {}
        name = ""
        for line in text.strip("\n").splitlines():
            if not line.strip():
                continue
            if line[0].isspace():
                merged[name] += line.strip()
                continue
            name, _, rest = line.partition(":")
            if self._choices.get(name) or name in merged:
                raise ValueError(f"pool {name!r} is defined twice")
            merged[name] = rest.strip()
        for name, body in merged.items():
            # The list is extended in place, so templates that were parsed before their pool see it too.
            self.reference(name).append(self.parse(f"[{body.removesuffix('|')}]")[0])

    def names(self) -> list[str]:
        """Names of all pools, in the order they were first seen."""
        return list(self._choices)

    def missing(self) -> list[str]:
        """Pools that a template names and nothing defines."""
        return [name for name, body in self._choices.items() if not body]

    def reference(self, name: str) -> list:
        """The sequence that stands for a pool, empty until the pool is defined."""
        return self._choices.setdefault(name, [])

    def parse(self, text: str) -> list:
        """Parse one template.

        Raises:
            ValueError: a bracket or brace does not close.
        """
        sequence, end = self._parse_sequence(text, 0, "")
        if end != len(text):
            raise ValueError(f"stray {text[end]!r} at {end} in template: {text}")
        return sequence

    def _parse_sequence(self, text: str, start: int, stops: str) -> tuple[list, int]:
        sequence: list = []
        at = start
        for match in _MARKS.finditer(text, start):
            if match.start() < at:
                continue
            if match.start() > at:
                sequence.append(text[at : match.start()])
            mark = match.group()
            at = match.start()
            if mark in stops:
                return sequence, at
            if mark == "{":
                end = text.find("}", at)
                if end < 0:
                    raise ValueError(f"an unclosed brace in template: {text}")
                name = text[at + 1 : end]
                sequence.append((self.reference(name[1:]),) if name.startswith("@") else Slot(name))
                at = end + 1
            elif mark == "[":
                options = []
                while text[at] != "]":
                    option, at = self._parse_sequence(text, at + 1, "|]")
                    options.append(option)
                sequence.append(Choice(options))
                at += 1
            else:
                return sequence, at
        if stops:
            raise ValueError(f"an unclosed bracket in template: {text}")
        if at < len(text):
            sequence.append(text[at:])
        return sequence, len(text)


class Values(dict):
    """Slot values of one story: strings, or parsed templates that are rendered anew at every mention."""

    def fill(self, sequence: list, rand: Callable[[], float]) -> str:
        """Render a parsed template; `rand` gives floats in [0, 1)."""
        out: list[str] = []
        self._render(sequence, rand, out)
        return "".join(out)

    def _render(self, sequence: list, rand: Callable[[], float], out: list[str]) -> None:
        for node in sequence:
            kind = type(node)
            if kind is str:
                out.append(node)
            elif kind is Choice:
                self._render(node.options[int(rand() * len(node.options))], rand, out)
            elif kind is tuple:
                self._render(node[0], rand, out)
            else:
                out.append(self._shaped(node, rand))

    def _shaped(self, slot: Slot, rand: Callable[[], float]) -> str:
        value = self.get(slot.key)
        if value is None:
            value = self[slot.name]
            if type(value) is not str:
                return slot.shape(self.fill(value, rand))
            # Shaped strings stay the same within a story: remember them.
            value = self[slot.key] = slot.shape(value)
        return value if type(value) is str else self.fill(value, rand)


def words_of(text: str) -> tuple[str, ...]:
    """Split a list written with commas, tidy, in order, without repeats."""
    return tuple(dict.fromkeys(" ".join(part.split()) for part in text.split(",") if part.strip()))


def slots_in(sequence: Iterable) -> set[str]:
    """Names of the slots a parsed template can reach, pools excluded."""
    found: set[str] = set()
    for node in sequence:
        if isinstance(node, Slot):
            found.add(node.name)
        elif isinstance(node, Choice):
            for choice in node.options:
                found |= slots_in(choice)
    return found
