"""Wishes that are no sentences: lists, numbered or with keys, keywords, words on lines of their own."""

from __future__ import annotations

from functools import cache
from random import Random

from .casting import Asked
from .grammar import Values, capitalise, words_of
from .phrases import POOLS

_KEYS = {
    "hero": words_of("""hero, hero, main character, who, character, character 1, first character, protagonist, star,
        main role, hero 1, main, about, subject, figure, first, person or animal, role 1, 1st hero"""),
    "mate": words_of("""friend, second character, character 2, and, with, hero 2, other hero, sidekick, companion, also,
        helper, best friend, second hero, side character, partner, guest, 2nd hero, second, role 2, plus"""),
    "name": words_of("name, hero's name, called, named, first name, name of the hero"),
    "kind": words_of("kind, what, animal or person, creature, what it is, species, hero is, type, being"),
    "looks": words_of("looks, character, looks like, adjectives, is, qualities, how, traits, nature"),
    "thing": words_of("thing, object, item, with, contains, important thing, something, prop, must have, find"),
    "place": words_of("place, where, setting, location, scene, happens, world, home, takes place"),
}
_EXTRAS = {
    "length, size": "short, long, one page, not too long, 300 words, medium, 5 minutes, very short",
    "style, tone, genre, sort": "funny, calm, fairy tale, exciting, a bit scary, sweet, adventure, silly, bedtime",
    "age, for, reader": "4, 5 years, children, my son, my daughter, kids, everybody, age 3-6, class 2",
    "ending, end, at the end": "happy, good, surprise, all are friends, funny, open, everyone sleeps",
    "theme, moral, message": "friendship, courage, sharing, honesty, being patient, family, winter, helping",
    "when, time": "evening, winter, long ago, at night, today, one summer day, on a birthday, in spring",
    "language, words": "English, easy, simple, easy words, simple English",
}
_EXTRA_LISTS = tuple((words_of(keys), words_of(values)) for keys, values in _EXTRAS.items())
_NUMBERS = ("{}. ", "{}. ", "{}) ", "({}) ", "{}: ", "{} ", "{} - ", "#{} ")
_BULLETS = ("- ", "- ", "* ", "* ", "• ", "+ ", "– ", "> ", "-", "*", "-> ", "~ ", "o ", "# ", "· ")
_BETWEEN = (", ", ", ", ",", "; ", ". ", " - ", " + ", "+", ";", " ... ", "   ", " & ", ": ")
_COLONS = (": ", ": ", ": ", ": ", ":", " = ", "=", " - ", " : ", " -> ", "? ", "\t", ":  ")


@cache
def _pool(name: str) -> list:
    return POOLS.parse(f"{{@{name}}}")


def _bare_hero(asked: Asked) -> str:
    if asked.role:
        return "bare_role"
    return "bare_called" if asked.name and asked.kind else ""


def _entries(random: Random, asked: Asked, values: Values) -> list[tuple[str, str]]:
    """What the wish names, each with what it is: whole heroes, or names, kinds and looks one by one; with articles or
    without."""
    is_bare = random.random() < 0.5
    is_apart = not asked.role and not asked.is_pair and random.random() < (0.3 if asked.name or asked.looks else 0)
    entries: list[tuple[str, str]] = []
    if is_apart:
        entries += [("name", values["hero"])] if asked.name else []
        kind = values["kind"]
        entries += [("kind", kind)] if asked.kind else []
        if asked.looks:
            joint = random.choice((", ", " and ", " "))
            entries.append(("looks", joint.join(values["chosen"])))
    elif is_bare and not asked.is_pair:
        pool = _bare_hero(asked)
        hero = values.fill(_pool(pool), random.random) if pool else values["looks" if asked.kind else "hero"]
        entries.append(("hero", hero))
    else:
        entries.append(("hero", values["h"]))
    if values["m"]:
        mate = values["m"]
        if is_bare and not asked.is_hers:
            mate = values.fill(_pool("bare_mate_called"), random.random) if asked.mate_name else values["matelooks"]
        entries.append(("mate", mate))
    if asked.thing:
        entries.append(("thing", values.fill(POOLS.parse("{asked}" if is_bare else "{a_asked}"), random.random)))
    if asked.place:
        place = values["home"]
        entries.append(("place", place.split(" ", 1)[1] if is_bare and random.random() < 0.4 else place))
    return entries


def _with_keys(random: Random, entries: list[tuple[str, str]]) -> list[str]:
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        keys, texts = random.choice(_EXTRA_LISTS)
        at = len(entries) if random.random() < 0.7 else random.randrange(len(entries) + 1)
        entries.insert(at, (random.choice(keys), random.choice(texts)))
    case = random.choice((str, str, capitalise, capitalise, capitalise, str.upper))
    colon, shape = random.choice(_COLONS), random.choice(("{}",) * 12 + ("**{}**", "<{}>", "- {}"))
    keys = [case(random.choice(_KEYS[part]) if part in _KEYS else part) for part, _ in entries]
    return [shape.format(key) + colon + text for key, (_, text) in zip(keys, entries, strict=True)]


def phrase_form(random: Random, asked: Asked, values: Values) -> str:
    """Put a wish into a list or into keywords; `h` and `m` of the values are the words for both heroes."""
    rand = random.random
    entries = _entries(random, asked, values)
    if rand() < 0.15:
        random.shuffle(entries)
    roll = rand()
    is_keyed = roll < 0.27
    texts = _with_keys(random, entries) if is_keyed else [text for _, text in entries]
    if not is_keyed and rand() < 0.1:
        texts.append(random.choice(random.choice(_EXTRA_LISTS)[1]))
    if not is_keyed and rand() < 0.2:
        texts = list(map(capitalise, texts))
    between = "\n"
    if roll >= 0.79:
        between = random.choice(_BETWEEN)
        quote = random.choice(("",) * 12 + ('"', "'", "#", "*"))
        texts = [f"{quote}{text}{'' if quote == '#' else quote}" for text in texts] if quote else texts
    elif is_keyed:
        between = "\n" if rand() < 0.65 else random.choice((", ", "; ", ". ", "  ", " - ", "\n\n"))
    elif roll < 0.65:
        number, bullet = random.choice(_NUMBERS), random.choice(_BULLETS)
        first = "a" if rand() < 0.1 else "1"
        is_numbered = rand() < 0.55
        marks = [number.format(chr(ord(first) + at)) if is_numbered else bullet for at in range(len(texts))]
        texts = [mark + text for mark, text in zip(marks, texts, strict=True)]
        between = "\n" if rand() < 0.85 else " "
    text = between.join(texts) + ("." if rand() < 0.1 else "")
    if rand() < 0.45:
        title = values.fill(_pool("form_title"), rand)
        text = title + random.choice(("\n", "\n", "\n\n", " ")) + text
    if rand() < 0.2:
        text += random.choice(("\n", "\n", "\n\n", " ")) + values.fill(_pool("form_note"), rand)
    return text
