"""Names of characters: common first names with a known gender, and rare ones, blended or invented."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from .grammar import capitalise, words_of
from .phrases import read_text, text_names
from .split import is_name_allowed

GIRLS, BOYS, PET_NAMES = (words_of(read_text(f"names/{name}.txt")) for name in ("girls", "boys", "pets"))
_SIMPLE_ONSETS = words_of("""
b, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, z""")
_RICH_ONSETS = words_of("""
bl, br, cl, cr, dr, fl, fr, gl, gr, kl, kr, pl, pr, qu, sh, sk, sl, sm, sn, sp, st, sw, thr, tr, tw, wh, ch,
th, zw, y, c, ph""")
# Plain vowels come up twice as often as pairs.
_VOWELS = (*"aeiouaeiou", "y", "ee", "oo", "ai", "ia", "io", "ea", "ou")
_CODAS = words_of("""
b, d, g, k, l, m, n, n, p, r, r, s, t, x, ck, ll, lm, lt, mp, nd, nk, nn, rk, rn, sh, sk, ss, tt, zz, ng, rl,
rt, st, ft""")
_ENDINGS = words_of("""
a, o, i, e, us, is, in, en, an, el, il, ette, ina, ora, ello, ix, ax, on, um, ara, iko, uma, eth, wen, dor,
mir, bert, by, dle, kin, ling, wick, ton, bo, po, ra, la, na, zu, ble, kle, mo, ti, vi, ny""")


_DOUBLE_SHARE = 0.015
# Everyday words stand as a name or a thing, too, so that every whole token of the vocabulary is copied sometimes.
_FUNCTION_WORDS = frozenset(
    words_of("""
he, she, it, they, him, her, them, his, hers, its, their, theirs, himself, herself, itself, themself,
themselves, the, and, but, for, nor, yet, was, were, are, had, has, have, did, does, not, you, your, who,
whom, whose, that, this, these, those, what, when, where, which, why, how, hero, pal, elder, friend, name,
plot, ask, let, end, meet, thing, newthing, kind, named, called, said, felt, told, with, from, into, over,
than, then, there, our, out, off, all, any, can, will, would, could, should, may, might, must, one, two,
three, four, five, six, day, monday, tuesday, wednesday, thursday, friday, saturday, sunday""")
)


@cache
def everyday_words() -> tuple[str, ...]:
    """Words of three to eleven letters that the grammar's own text uses, without function words."""
    files = [name for folder in ("plots", "pools") for name in text_names(folder)]
    # A slot or a pool's name is not a word, and a contraction is not a name.
    text = re.sub(r"\{[^}]*\}|\w+'\w+|^\w+:", " ", "\n".join(map(read_text, files)), flags=re.MULTILINE)
    words = {word.lower() for word in [*re.findall(r"\b[A-Za-z]{3,11}\b", text), *GIRLS, *BOYS, *PET_NAMES]}
    return tuple(sorted(words - _FUNCTION_WORDS))


def odd_word(random: Random) -> str:
    """A word that is seldom a name: an everyday one, or one spelled unlike any name."""
    roll = random.random()
    if roll < 0.75:
        return random.choice(everyday_words())
    word = invent_word(random)
    at = random.randrange(1, len(word))
    if roll < 0.88:
        return word[:at] + random.choice("bcdfghjkqvwxz") + word[at:]
    return random.choice(everyday_words())[:4] + word


def blend(random: Random, words: Sequence[str]) -> str:
    """A word that begins as one of these does and ends as another, in lower case."""
    first, second = random.choice(words).lower(), random.choice(words).lower()
    head = first[: random.randint(2, max(2, len(first) - 1))]
    return head + (second[random.randrange(len(second)) :] if random.random() < 0.8 else "")


def blend_name(random: Random) -> str:
    """A blended name, in lower case: `Marcia` of Marcus and Alicia.

    A model that only knows the list completes such a name to a listed one; it must copy it to the end.
    """
    names = (*GIRLS, *BOYS, *PET_NAMES)
    while True:
        word = blend(random, names)
        if 3 <= len(word) <= 11 and word.isalpha() and capitalise(word) not in names and word not in _FUNCTION_WORDS:
            return word


def misspell(random: Random, word: str) -> str:
    """A word with a letter left out, doubled, or two of them swapped."""
    at = random.randrange(1, max(2, len(word) - 1))
    return random.choice((
        word[:at] + word[at + 1 :], word[: at + 1] + word[at:], word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
    ))  # fmt: skip


def invent_word(random: Random) -> str:
    """Make up a word of one to three syllables that can be said aloud, in lower case."""
    rand = random.random

    def pick(parts: tuple[str, ...]) -> str:
        return parts[int(rand() * len(parts))]

    roll = rand()
    word = "" if roll < 0.12 else pick(_RICH_ONSETS if roll < 0.42 else _SIMPLE_ONSETS)
    word += pick(_VOWELS)
    if rand() < 0.35:
        word += pick(_SIMPLE_ONSETS) + pick(_VOWELS)
    if rand() < 0.5:
        word += pick(_CODAS)
    if len(word) < 4 or rand() < 0.45:
        word += pick(_ENDINGS) if word[-1] not in "aeiouy" else pick(_CODAS)
    word = word if len(word) > 2 else word + pick(_ENDINGS)
    # A creature called Her would make every pronoun a riddle.
    return invent_word(random) if word in _FUNCTION_WORDS else word


def choose_name(random: Random, split: str, rare_share: float, is_child: bool) -> tuple[str, str]:
    """Choose a name of the split; return it with its gender: `she`, `he`, or empty where a name has none.

    A share of names is rare: blended of two, invented, or a word that is no name.
    """
    while True:
        if random.random() < rare_share:
            make = random.choices((blend_name, invent_word, odd_word), (0.45, 0.25, 0.3))[0]
            name, gender = capitalise(make(random)), ""
        else:
            roll = random.random()
            if roll < (0.48 if is_child else 0.36):
                name, gender = random.choice(GIRLS), "she"
            elif roll < (0.96 if is_child else 0.72):
                name, gender = random.choice(BOYS), "he"
            else:
                name, gender = random.choice(PET_NAMES), ""
        is_allowed = is_name_allowed(name, split)
        if random.random() < _DOUBLE_SHARE:
            second = random.choice(PET_NAMES)
            is_allowed &= second != name and is_name_allowed(second, split)
            name = f"{name} {second}"
            is_allowed &= is_name_allowed(name, split)
        if is_allowed:
            return name, gender
