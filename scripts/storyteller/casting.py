"""Casts a story: who is in it, what they are like, where they live and what it turns on.

What a request will name may be rare, so that copying is learned from what no list holds. Rare names, kinds and looks
stand only where a request names them, so nobody meets them unasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from .creatures import (
    CHILD,
    COMMON_KINDS,
    COMMON_LOOKS,
    FEELINGS,
    FOLK,
    PETS,
    PRONOUNS,
    choose_elder,
    choose_helper,
    choose_kind,
    choose_looks,
    choose_pronoun,
    choose_role,
    plural_of,
)
from .grammar import Values, capitalise, fix_articles, with_article
from .names import BOYS, GIRLS, PET_NAMES, choose_name, odd_word
from .phrases import POOLS
from .plots import Plot, Thread
from .things import ORDINARY, choose_thing, is_compound

# Of names and things that a request names.
RARE_SHARE = 0.4
# Of kinds and looks that a request names.
RARE_KIND_SHARE = 0.35
_COMMON_FRIEND_LOOKS = 0.25
# The kind stands with one of its looks at one of four places of such a story.
_FOND_SHARE = 0.6
_RELATIVES = ("sister", "brother", "grandmother", "grandfather", "mother", "father", "aunt", "uncle")
_RELATIVE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request will name. A role is what the hero is to whoever asks: `my son`."""

    name: bool = False
    thing: bool = False
    kind: bool = False
    looks: bool = False
    role: bool = False
    place: bool = False
    mate: bool = False
    mate_name: bool = False
    is_hers: bool = False  # `her dog`, `his grandmother`
    is_pair: bool = False  # `two mice`
    rare_share: float = RARE_SHARE

    @property
    def rare_kind_share(self) -> float:
        """Share of rare kinds and looks among those that the request names."""
        return RARE_KIND_SHARE * self.rare_share / RARE_SHARE


NOTHING = Asked(rare_share=0.0)
_SETTING = POOLS.parse("{@setting}")
_RARE_PLACES = ("in the land of {}", "on planet {}", "in {}", "in the village of {}", "on the island of {}", "in a {}")
_HOMES = {
    name: POOLS.parse(f"{{@{name}}}") for name in ("house", "burrow", "cave", "barn", "nest", "nook", "pool", "toyroom")
}


def in_a_row(words: Sequence[str]) -> str:
    """Words as one says them: `small, blue and shy`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@cache
def _common_words() -> frozenset[str]:
    return frozenset((*GIRLS, *BOYS, *PET_NAMES, *ORDINARY, *COMMON_KINDS, *COMMON_LOOKS, *_RELATIVES))


def is_common(word: str) -> bool:
    """Tell whether a list has this name, thing, kind or look; a thing of two listed halves counts."""
    common = _common_words()
    return word in common or all(part in common for part in word.split(" ")) or "-" in word and is_compound(word)


@cache
def _fond(kind: str, look: str) -> list:
    """A kind that is told with one of its looks now and then."""
    return POOLS.parse(f"[{kind}|{kind}|{kind}|{look} {kind}]")


def _cast_hero(random: Random, asked: Asked, split: str) -> dict[str, object]:
    """Values of the hero."""
    role, (kind, body) = "", choose_kind(random, asked.rare_kind_share if asked.kind else 0.0)
    if asked.role:
        role, kind, body = choose_role(random)
    is_person = body in (CHILD, FOLK)
    while True:
        name, gender = choose_name(random, split, asked.rare_share if asked.name else 0.0, body is CHILD or bool(role))
        pronoun = choose_pronoun(random, kind, gender)
        if (not gender or gender == pronoun) and not (is_person and pronoun == "it"):
            break
    count = random.choices((1, 2, 3), (0.45, 0.4, 0.15) if asked.looks else (0.75, 0.2, 0.05))[0]
    looks = choose_looks(random, kind, count, asked.rare_kind_share if asked.looks else 0.0, asked.looks)
    who = " ".join((*looks, kind))
    return {
        "name": name, "hero": name, "kind": kind, "pronoun": pronoun, "role": role, "kinds": plural_of(kind),
        "trait": looks[0], "traits_and": in_a_row(looks), "looks": looks, "who": who,
        "kin": _fond(kind, random.choice(looks)) if random.random() < _FOND_SHARE else kind,
        "hands": body.hands, "feet": body.feet, "body": body,
    }  # fmt: skip


def _cast_friend(random: Random, asked: Asked, hero: dict[str, object]) -> dict[str, object]:
    """Values of the friend, who may be the hero's own: `her sister`, `his dog`."""
    rare_share = asked.rare_kind_share if asked.mate and not asked.is_hers else 0.0
    kind, looks = "", ()
    if asked.is_pair:
        kind = str(hero["kind"])
    elif asked.is_hers:
        kind = random.choice(_RELATIVES if random.random() < _RELATIVE_SHARE else PETS)
    while not asked.is_pair and (not kind or kind in (hero["kind"], "queen", "king", "twin")):
        kind, _ = choose_kind(random, rare_share)
    while True:
        name, gender = choose_name(random, "train", asked.rare_share if asked.mate_name else 0.0, False)
        if name != hero["name"] and gender in ("", choose_pronoun(random, kind, gender)):
            break
    if kind not in _RELATIVES and not asked.is_pair and random.random() < (0.5 if asked.mate else _COMMON_FRIEND_LOOKS):
        looks = choose_looks(random, kind, 1, rare_share)
    who = " ".join((*looks, kind))
    which = f"{PRONOUNS[str(hero['pronoun'])]['his']} {who}" if asked.is_hers else with_article(who)
    if asked.is_pair:
        which, kind = f"another {kind}", f"other {kind}"
    return {
        "friend": name, "friendkind": kind, "friendkinds": plural_of(kind), "friendlooks": looks, "matelooks": who,
        "friendkin": _fond(kind, looks[0]) if looks else kind, "a_friendkind": which,
        "friend_full": f"{name}, {which}", "friend_the": f"{name} the {kind}",
    }  # fmt: skip


def _cast_home(random: Random, asked: Asked, values: Values) -> str:
    """Where the hero lives: a place that a request names, or a home that fits the body."""
    if not asked.place:
        return fix_articles(values.fill(_HOMES[values["body"].home], random.random))
    if random.random() < asked.rare_kind_share:
        shape = random.choice(_RARE_PLACES)
        word = odd_word(random)
        return fix_articles(shape.format(word if shape.endswith("a {}") else capitalise(word)))
    return fix_articles(values.fill(_SETTING, random.random))


def cast(random: Random, plot: Plot, thread: Thread | None, split: str, asked: Asked) -> Values:
    """Choose everybody and everything a plot needs, and bind its values."""
    rand = random.random
    hero = _cast_hero(random, asked, split)
    kind, pronoun = str(hero["kind"]), str(hero["pronoun"])
    thing = choose_thing(random, plot.name, split, asked.rare_share if asked.thing else 0.0)
    friend = _cast_friend(random, asked, hero)
    while True:
        look, helper_kind = choose_helper(random, kind)
        if helper_kind not in str(friend["friendkind"]):
            break
    helper_name = str(hero["name"])
    while helper_name in (hero["name"], friend["friend"]):
        helper_name, _ = choose_name(random, "train", 0.0, False)
    helper = f"{look} {helper_kind}"
    is_named = rand() < 0.2
    values = Values(PRONOUNS[pronoun])
    values.update(hero)
    values.update(friend)
    values.update(
        thing=thing.noun, thing_full=thing.full, newthing=thing.full, colour=thing.colour,
        asked=thing.full if rand() < 0.5 else thing.noun,
        elder=choose_elder(random), feel=random.choice(FEELINGS),
        helper=helper, helper_name=helper_name if is_named else "",
        meet=f"{with_article(helper)} {random.choice(('called', 'named'))} {helper_name}"
        if is_named else with_article(helper),
        pal=POOLS.parse(f"[{helper_name}|{helper_name}|the {helper_kind}]" if is_named else f"the {helper_kind}"),
    )  # fmt: skip
    values["home"] = _cast_home(random, asked, values)
    for key, template in {**plot.lets, **(thread.lets if thread else {})}.items():
        values[key] = fix_articles(values.fill(template, rand))
    return values
