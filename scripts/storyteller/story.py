"""Tells one story: casts the characters, renders a plot in its frame, and records its facts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from .creatures import (
    CHILD,
    FEELINGS,
    FOLK,
    PRONOUNS,
    TRAITS,
    choose_elder,
    choose_helper,
    choose_kind,
    choose_pronoun,
)
from .grammar import Values, with_article
from .names import choose_name
from .phrases import POOLS
from .plots import PLOTS, THREADS, Plot, Thread
from .sentences import repeated_sentences
from .things import choose_thing

# Rare names and things teach copying. They stand only where a request names them, so nobody meets them unasked.
RARE_SHARE = 0.4
INVENTED_KINDS = 0.015
THREAD_SHARE = 0.5
LAST_SHARE = 0.25
SCENERY_SHARE = 0.08

_OPEN, _CLOSE, _LAST = (POOLS.parse(f"{{@{name}}}") for name in ("open", "close", "last"))
_HOMES = {name: POOLS.parse(f"{{@{name}}}") for name in ("house", "burrow", "cave", "barn", "nest", "nook", "toyroom")}
_SCENERY = {name: POOLS.parse(f"{{@{name}}}") for name in ("out", "night", "in")}
_SPACES = re.compile(r" +(?=[ ,.?!])")
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
    """A story with all that was fixed while telling it."""

    shape: str
    text: str
    facts: dict[str, str]
    values: Values
    plot: Plot


def fix_articles(text: str) -> str:
    """Set every `a` and `an` right for the word after it."""
    return _ARTICLE.sub(lambda match: match[1] + (" " if match[0].endswith("n ") else "n "), text)


def plural_of(noun: str) -> str:
    """The plural of a kind of creature."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _cast(random: Random, plot: Plot, thread: Thread | None, split: str, rare_share: float) -> Values:
    """Choose everybody and everything a plot needs, and bind its values."""
    rand = random.random
    kind, body = choose_kind(random, INVENTED_KINDS)
    is_person = body in (CHILD, FOLK)
    while True:
        name, gender = choose_name(random, split, rare_share, body is CHILD)
        pronoun = choose_pronoun(random, kind, gender)
        if (not gender or gender == pronoun) and not (is_person and pronoun == "it"):
            break
    thing = choose_thing(random, plot.name, split, rare_share)
    look, helper_kind = choose_helper(random, kind)
    others: list[str] = []
    while len(others) < 2:
        other, _ = choose_name(random, "train", 0.0, False)
        if other not in (name, *others):
            others.append(other)
    friend, helper_name = others
    friend_kind = kind
    while friend_kind in (kind, helper_kind, "queen", "king", "twin"):
        friend_kind, _ = choose_kind(random, 0.0)
    trait, helper = random.choice(TRAITS), f"{look} {helper_kind}"
    is_named = rand() < 0.2
    values = Values(PRONOUNS[pronoun])
    values.update(
        name=name, hero=name, kind=kind, trait=trait, who=f"{trait} {kind}", pronoun=pronoun,
        kinds=plural_of(kind), hands=body.hands, feet=body.feet,
        thing=thing.noun, thing_full=thing.full, newthing=thing.full, colour=thing.colour,
        asked=thing.full if rand() < 0.5 else thing.noun,
        friend=friend, friendkind=friend_kind, friendkinds=plural_of(friend_kind),
        friend_full=f"{friend}, {with_article(friend_kind)}", friend_the=f"{friend} the {friend_kind}",
        elder=choose_elder(random), feel=random.choice(FEELINGS),
        helper=helper, helper_name=helper_name if is_named else "",
        meet=f"{with_article(helper)} {random.choice(('called', 'named'))} {helper_name}"
        if is_named else with_article(helper),
        pal=POOLS.parse(f"[{helper_name}|{helper_name}|the {helper_kind}]" if is_named else f"the {helper_kind}"),
    )  # fmt: skip
    values["home"] = fix_articles(values.fill(_HOMES[body.home], rand))
    for key, template in {**plot.lets, **(thread.lets if thread else {})}.items():
        values[key] = fix_articles(values.fill(template, rand))
    return values


_FACTS = (
    "name", "kind", "trait", "pronoun", "thing", "thing_full", "colour", "friend", "friendkind", "elder", "helper",
    "helper_name", "feel", "home",
)  # fmt: skip


def _render(random: Random, plot: Plot, thread: Thread | None, values: Values) -> str:
    """Render the opening, the beats of the plot, and the ending that answers the opening."""
    rand = random.random
    paragraphs = [[values.fill(_OPEN, rand)], []]
    if thread:
        paragraphs[0].append(values.fill(thread.opens[int(rand() * len(thread.opens))], rand))
    for beat in plot.beats:
        paragraphs[-1].append(values.fill(beat.tellings[int(rand() * len(beat.tellings))], rand))
        if beat.scenery and rand() < SCENERY_SHARE:
            paragraphs[-1].append(values.fill(_SCENERY[beat.scenery], rand))
        if beat.ends_paragraph:
            paragraphs.append([])
    closes = thread.closes if thread else plot.closes or [_CLOSE]
    paragraphs.append([values.fill(closes[int(rand() * len(closes))], rand)])
    if rand() < LAST_SHARE:
        paragraphs[-1].append(values.fill(_LAST, rand))
    text = "\n\n".join(" ".join(filter(None, map(str.strip, parts))) for parts in paragraphs if parts)
    return fix_articles(_SPACES.sub("", text))


def tell_ending(random: Random, story: Story) -> str:
    """Tell another ending of a story."""
    return fix_articles(story.values.fill(random.choice(story.plot.endings), random.random))


def tell(random: Random, split: str = "train", plot: Plot | None = None, rare_share: float = 0.0) -> Story:
    """Tell a story of the given split, of a random shape unless a plot is given."""
    plot = plot or random.choice(PLOTS)
    while True:
        thread = random.choice(THREADS) if random.random() < THREAD_SHARE else None
        values = _cast(random, plot, thread, split, rare_share)
        text = _render(random, plot, thread, values)
        if not repeated_sentences(text):
            return Story(plot.name, text, {key: values[key] for key in (*_FACTS, *plot.lets)}, values, plot)
