"""Tells one story: casts the characters, renders a plot in its frame, and records the facts that were told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import log2
from random import Random

from .creatures import (
    CHILD,
    FEELINGS,
    FOLK,
    KINDS,
    NUM_HELPERS,
    PRONOUNS,
    TRAITS,
    choose_elder,
    choose_helper,
    choose_kind,
    choose_pronoun,
)
from .grammar import Mark, Values, with_article
from .names import choose_name
from .page import COSTS, Page
from .paraphrase import LOOKS
from .phrases import POOLS
from .plots import PLOTS, Plot
from .things import NUM_LOOKS, choose_thing

# Copying is learned from names that no list could hold, so a large share of them is invented.
INVENTED_NAMES = 0.45
INVENTED_THINGS = 0.4
INVENTED_KINDS = 0.06
MIDDLE_SHARE = 0.15
LAST_SHARE = 0.25
SCENERY_SHARE = 0.08

_OPEN = POOLS.parse("{@open}")
_MIDDLE = (POOLS.parse("{@traitbit}"), POOLS.parse("{@habit}"))
_CLOSE = POOLS.parse("{@close}")
_LAST = POOLS.parse("{@last}")
_HOMES = {True: POOLS.parse("{@home}"), False: POOLS.parse("{@den}")}
_SCENERY = {name: POOLS.parse(f"{{@{name}}}") for name in ("out", "night", "in")}
_DETAILS = {name: POOLS.parse(f"{{@{name}}}") for name in (*COSTS, *set(LOOKS.values()))}
_SENTENCE_END = re.compile(r'(?<=[.!?]) +(?=["A-Z])|(?<=[.!?]") +(?=["A-Z])|\n+')
# Pools are drawn after an article is written, so the article is set right at the end.
_ARTICLE = re.compile(
    r"\b([Aa])(?: (?=[aeiou]|hour|honest|heir)(?!uni|one|use|usu|eu|uku)|n (?=[^aeiouAEIOU])(?!hour|honest|heir))"
)
_IRREGULAR = {
    "mouse": "mice",
    "dormouse": "dormice",
    "goose": "geese",
    "wolf": "wolves",
    "child": "children",
    "calf": "calves",
    "sheep": "sheep",
    "deer": "deer",
    "reindeer": "reindeer",
    "moose": "moose",
    "fisherman": "fishermen",
    "postman": "postmen",
    "snowman": "snowmen",
    "dwarf": "dwarfs",
    "clockwork mouse": "clockwork mice",
}


@dataclass(slots=True)
class Story:
    """A told story with all that was fixed while telling it."""

    shape: str
    text: str
    facts: dict[str, str]
    values: Values
    plot: Plot


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences; a quoted sentence stays with the words that carry it."""
    return [part for part in _SENTENCE_END.split(text) if part]


def fix_articles(text: str) -> str:
    """Set every `a` and `an` right for the word that came to stand behind it."""
    return _ARTICLE.sub(lambda match: match[1] + (" " if match[0].endswith("n ") else "n "), text)


def repeated_sentences(text: str) -> list[str]:
    """Sentences that stand in a text more than once; cries of one to three words may."""
    seen: set[str] = set()
    repeated = []
    for sentence in sentences_of(text):
        if sentence in seen and sentence.count(" ") >= 3:
            repeated.append(sentence)
        seen.add(sentence)
    return repeated


def plural_of(noun: str) -> str:
    """The plural of a kind of creature."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _cast(random: Random, plot: Plot, split: str) -> tuple[Values, dict[str, str]]:
    """Choose everybody and everything a plot needs, and bind its values."""
    kind, body = choose_kind(random, INVENTED_KINDS)
    is_person = body in (CHILD, FOLK)
    while True:
        name, gender = choose_name(random, split, INVENTED_NAMES, body is CHILD)
        pronoun = choose_pronoun(random, kind, gender)
        if (not gender or gender == pronoun) and not (is_person and pronoun == "it"):
            break
    trait = random.choice(TRAITS)
    thing = choose_thing(random, plot.name, split, INVENTED_THINGS)
    look, helper_kind = choose_helper(random, kind)
    others: list[str] = []
    while len(others) < 2:
        other, _ = choose_name(random, "train", 0.35, False)
        if other != name and other not in others:
            others.append(other)
    friend, helper_name = others
    friend_kind = kind
    while friend_kind in (kind, helper_kind, "queen", "king", "twin", "orphan"):
        friend_kind, _ = choose_kind(random, 0.02)
    values = Values(PRONOUNS[pronoun])
    facts = {
        "name": name,
        "kind": kind,
        "trait": trait,
        "pronoun": pronoun,
        "thing": thing.noun,
        "thing_full": thing.full,
        "colour": thing.colour,
        "friend": friend,
        "friendkind": friend_kind,
        "elder": choose_elder(random),
        "helper": f"{look} {helper_kind}",
        "feel": random.choice(FEELINGS),
    }
    values.update(facts)
    is_named = random.random() < 0.2
    facts["helper_name"] = helper_name if is_named else ""
    helper = facts["helper"]
    home, home_marks = values.trace(_HOMES[body.lives_in_house], random.random)
    values.update(
        hero=name,
        helper_name=helper_name,
        who=f"{trait} {kind}",
        kinds=plural_of(kind),
        friendkinds=plural_of(friend_kind),
        hands=body.hands,
        feet=body.feet,
        newthing=thing.full,
        asked=thing.full if random.random() < 0.5 else thing.noun,
        friend_full=f"{friend}, {with_article(friend_kind)}",
        friend_the=f"{friend} the {friend_kind}",
        home=fix_articles(home),
        meet=f"{with_article(helper)} {random.choice(('called', 'named'))} {helper_name}"
        if is_named
        else with_article(helper),
        pal=POOLS.parse(
            f"[{helper_name}|{helper_name}|the {helper_kind}]"
            if is_named
            else f"[the {helper_kind}|the {helper_kind}|the {helper}]"
        ),
    )
    facts["home"] = values["home"]
    values.bits.update(
        kind=log2(len(KINDS)),
        trait=log2(len(TRAITS)),
        friendkind=log2(len(KINDS)),
        helper=log2(NUM_HELPERS),
        feel=log2(len(FEELINGS)),
        home=sum(bits for _, bits, _ in home_marks),
        newthing=log2(NUM_LOOKS),
    )
    # Other forms of a value tell no more than the value itself.
    values.parts.update(
        kinds=("kind",), who=("trait", "kind"), friendkinds=("friendkind",), friend_full=("friendkind",),
        friend_the=("friendkind",), meet=("helper",),
    )  # fmt: skip
    for key, template in plot.lets.items():
        text, marks = values.trace(template, random.random)
        facts[key] = values[key] = fix_articles(text)
        values.bits[key] = sum(bits for _, bits, _ in marks)
    return values, facts


def _render(random: Random, plot: Plot, values: Values, fixed: Iterable[str]) -> Page:
    """Render frame and plot once, and add details where the wording would be too much the same in every telling."""
    rand = random.random
    page = Page()
    page.add(*values.trace(_OPEN, rand))
    for middle in _MIDDLE:
        if rand() < MIDDLE_SHARE:
            page.add(*values.trace(middle, rand))
    page.break_paragraph()
    for beat in plot.beats:
        page.add(*values.trace(beat.tellings[int(rand() * len(beat.tellings))], rand))
        if beat.scenery and rand() < SCENERY_SHARE:
            page.add(*values.trace(_SCENERY[beat.scenery], rand))
        if beat.ends_paragraph:
            page.break_paragraph()
    page.break_paragraph()
    page.add(*values.trace(_CLOSE, rand))
    if rand() < LAST_SHARE:
        page.add(*values.trace(_LAST, rand))
    page.enrich(partial(_detail, values, rand), fixed)
    return page


def _detail(values: Values, rand: Callable[[], float], kind: str) -> tuple[str, list[Mark]]:
    """Tell a phrase of a kind, with the space that parts it from what follows."""
    text, marks = values.trace(_DETAILS[kind], rand)
    return (text if text[0] == "," else text + " "), marks


def tell_ending(random: Random, story: Story) -> str:
    """Tell another ending of a story."""
    values, rand = story.values, random.random
    page = Page()
    page.add(*values.trace(random.choice(story.plot.endings), rand))
    page.enrich(partial(_detail, values, rand), _fixed(story.plot, story.facts), opening_words=3)
    return fix_articles(page.text())


def _fixed(plot: Plot, facts: dict[str, str]) -> set[str]:
    """What may be asked about stays as it was chosen; a long saying need not, and is not asked for then."""
    keys = (*plot.lets, "name", "friend", "helper_name", "thing", "thing_full", "home", "helper", "feel")
    return {facts[key] for key in keys if len(facts[key]) > 2 and not (key == "saying" and len(facts[key]) > 45)}


def write_page(random: Random, split: str, plot: Plot) -> Page:
    """Write a story of a plot, and keep what was chosen."""
    values, facts = _cast(random, plot, split)
    return _render(random, plot, values, _fixed(plot, facts))


def tell(random: Random, split: str = "train", plot: Plot | None = None) -> Story:
    """Tell a story of the given split, of a random shape unless a plot is given."""
    plot = plot or PLOTS[int(random.random() * len(PLOTS))]
    while True:
        values, facts = _cast(random, plot, split)
        text = fix_articles(_render(random, plot, values, _fixed(plot, facts)).text())
        if not repeated_sentences(text):
            return Story(plot.name, text, facts, values, plot)
