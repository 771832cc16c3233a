"""Wishes as people write them: who is in the story, whose they are and where, in one sentence, several, or a list."""

from __future__ import annotations

from functools import cache
from random import Random

from .casting import Asked, in_a_row
from .creatures import plural_of
from .forms import phrase_form
from .grammar import Values, capitalise, fix_articles, with_article, words_of
from .phrases import POOLS, read_text
from .relations import join_heroes
from .story import Story

# Of the wishes: lists and keywords.
_FORM_SHARE = 0.25
# Of the wishes for two: those that join them by more than a word such as `and`.
_JOINED_SHARE = 0.55
# Of the wishes about a child, about somebody else with a name, and about `my son`: they begin with who that is.
_CHILD_SELF_SHARE, _SELF_SHARE, _OURS_SHARE = 0.35, 0.1, 0.3
# Of the wishes in one sentence: nothing stands around those whom they are about.
_BARE_SHARE = 0.14
# Of the children whom a wish is about: it is they who ask.
_ME_SHARE = 0.12
# Of the wishes for two: somebody who helps in the story is asked for, too.
_THIRD_SHARE = 0.12
_MISTYPED = {
    "please": ("pls", "plz", "pleas", "plese"), "story": ("stroy", "storry", "sotry"), "about": ("abt", "abot"),
    "called": ("caled", "calld"), "named": ("namd",), "friend": ("freind",), "tell": ("tel",), "you": ("u",),
    "little": ("litle",), "with": ("wiht", "w/"),
}  # fmt: skip


# Words of a sentence in no order: so that the heroes are found whatever stands around them.
_ANY_WORDS = words_of(read_text("around.txt"))
_JUMBLED_SHARE = 0.12
# Of the wishes for a hero without a name: `My son loves small blue dragons.`
_PLURAL_SHARE = 0.08


@cache
def _pool(name: str) -> list:
    return POOLS.parse(f"{{@{name}}}")


def choose_asked(random: Random, rare_share: float) -> Asked:
    """Choose what a wish names."""
    rand = random.random
    roll = rand()
    has_role = roll < 0.16
    has_name = has_role or rand() < 0.55
    has_kind = not has_role and (not has_name or rand() < 0.75)
    has_mate = rand() < 0.55
    is_pair = has_mate and rand() < 0.12
    is_hers = has_mate and not is_pair and rand() < 0.2
    return Asked(
        name=has_name, kind=has_kind, looks=has_kind and rand() < 0.6, role=has_role, thing=rand() < 0.4,
        place=rand() < 0.25, mate=has_mate, mate_name=has_mate and (has_name if is_pair else rand() < 0.4),
        is_hers=is_hers, is_pair=is_pair, rare_share=rare_share,
    )  # fmt: skip


def mistype(random: Random, text: str) -> str:
    """What hasty fingers make of a wish: small letters, no last stop, a wrong letter, a line break for a space."""
    rand = random.random
    if rand() < 0.05:
        words = text.split(" ")
        words = [random.choice(_MISTYPED.get(word, (word,))) if rand() < 0.5 else word for word in words]
        text = " ".join(words)
    roll = rand()
    if roll < 0.16:
        text = text.lower()
    elif roll < 0.22:
        text = text[:1].lower() + text[1:]
    elif roll < 0.23:
        text = text.upper()
    elif roll < 0.25:
        text = " ".join(map(capitalise, text.split(" ")))
    if rand() < 0.15 and text[-1] in ".!":
        text = text[:-1]
    elif rand() < 0.03:
        text = text.rstrip(".") + random.choice(("!!", "...", "!!!", " ", " :)", "?"))
    if rand() < 0.05 and text.count(" ") > 3:
        places = [at for at, character in enumerate(text) if character == " "]
        at = random.choice(places)
        text = text[:at] + random.choice(("\n", "\n", "\n\n", "  ")) + text[at + 1 :]
    return text.rstrip("\n") if rand() < 0.98 else text + "\n"


def _in_a_row_or_so(random: Random, looks: tuple[str, ...], kind: str) -> str:
    """Looks and kind as somebody may say them: with or without commas, all or, if nothing is rare, some."""
    roll = random.random()
    if roll < 0.78 or len(looks) < 2:
        return " ".join((*looks, kind))
    if roll < 0.92:
        return f"{', '.join(looks)} {kind}"
    return f"{in_a_row(looks)} {kind}"


def _hero(random: Random, asked: Asked, values: Values) -> str:
    """The words for the hero, or for both where they are alike."""
    if asked.is_pair:
        pool = "pair_of_role" if asked.role else "pair_called" if asked.name and asked.kind else "pair_alike"
        pool = "pair_only" if asked.name and not asked.kind and not asked.role else pool
        values["roles"] = plural_of(values["role"])
        values["pair"] = " ".join(filter(None, (" ".join(values["looks"]) if asked.looks else "", values["kinds"])))
    elif asked.role:
        is_me = values["kind"] in ("boy", "girl") and random.random() < _ME_SHARE
        pool = "hero_me" if is_me else "hero_role"
    elif asked.name and asked.kind:
        pool = "hero_called_described" if asked.looks and random.random() < 0.15 else "hero_called"
    elif asked.name:
        pool = "hero_only"
    else:
        pool = "hero_described" if asked.looks else "hero_plain"
    values["looks"] = _in_a_row_or_so(random, values["looks"], values["kind"]) if asked.looks else values["kind"]
    return values.fill(_pool(pool), random.random)


def _mate(random: Random, asked: Asked, values: Values, story_text: str) -> str:
    """The words for the second hero, and now and then a third."""
    if asked.mate_name:
        is_bare = not asked.is_hers and random.random() < (0.2 if asked.kind else 0.5)
        pool = "mate_only" if is_bare else "mate_called"
    else:
        pool = "mate_hers" if asked.is_hers else "mate_plain"
    mate = values.fill(_pool(pool), random.random)
    if random.random() < _THIRD_SHARE and values["helper"] in story_text:
        return f"{mate} and {with_article(values['helper'].split(' ', random.randrange(2))[-1])}"
    return mate


def _jumble(random: Random, fewest: int) -> str:
    """Common words in no order, with a mark now and then."""
    words = random.choices(_ANY_WORDS, k=random.randint(fewest, 7))
    return " ".join(word + random.choice(",.!?:") if random.random() < 0.08 else word for word in words)


def _frame(random: Random, values: Values) -> str:
    """A sentence around those whom a wish is about; now and then it says nothing, or there is none."""
    if random.random() < _BARE_SHARE:
        return values["subj"] + random.choice(("", "", "", ".", "!", "?"))
    if random.random() >= _JUMBLED_SHARE:
        return values.fill(_pool("wish"), random.random)
    before, after = _jumble(random, 1), _jumble(random, 0)
    parts = [before, values["subj"], after + random.choice((".", "?", "!", ""))]
    return " ".join(parts[random.random() < 0.1 :])


def _sentences(random: Random, asked: Asked, values: Values) -> list[str]:
    """A wish in one sentence or in several; the thing and the place stand inside or in sentences of their own."""
    rand = random.random

    def fill(pool: str) -> str:
        return values.fill(_pool(pool), rand)

    has_mate = bool(values["m"])
    rest = [part for part in ("thing", "place") if getattr(asked, part)]
    if not asked.mate and not asked.name and rand() < _PLURAL_SHARE:
        values["subj"] = " ".join(filter(None, (" ".join(values["chosen"]) if asked.looks else "", values["kinds"])))
        return [fill("wish_plural"), *(fill(f"wish_{part}") for part in rest)]
    if rand() < 0.2:
        parts = [fill("wish_hero"), *([fill("wish_mate")] if has_mate else [])]
        parts += [fill(f"wish_{part}") for part in rest]
        if rand() < 0.3:
            random.shuffle(parts)
        return [fill("wish_intro"), *parts]
    roll = rand() if has_mate else 1.0
    if roll < _JOINED_SHARE / 3 and not asked.place:
        joined = join_heroes(random, values, "wish_relation")
        return [joined, *(fill(f"wish_{part}") for part in rest)]
    if roll < _JOINED_SHARE:
        values["subj"] = join_heroes(random, values, "pair_verb" if rand() < 0.6 else "pair_joined")
    else:
        values["subj"] = fill("pair") if has_mate else values["h"]
    later = []
    for part in rest:
        if rand() < 0.7:
            values["subj"] = fill(f"with_{part}")
        else:
            later.append(fill(f"wish_{part}"))
    if not later and rand() < 0.15:
        values["subj"] = fill("with_plot")
    return [_frame(random, values), *later]


def _introduced(random: Random, asked: Asked, values: Values, is_me: bool) -> list[str]:
    """A wish that begins with who somebody is: the one who asks, or `my son` of whoever asks."""
    suffix = "mate" if values["m"] else "alone"
    if is_me:
        pools = ["me_intro", f"me_{suffix}"]
    elif values["m"] and random.random() < 0.5:
        pools = ["ours_both"]
    else:
        pools = ["ours", f"ours_{suffix}"]
    parts = [join_heroes(random, values, pool, may_turn=False) for pool in pools]
    rest = [part for part in ("thing", "place") if getattr(asked, part)]
    teller = "me" if is_me else "wish"
    return [*parts, *(values.fill(_pool(f"{teller}_{part}"), random.random) for part in rest)]


def add_what_is_rare(random: Random, story: Story, wish: str) -> str:
    """Name what nobody could guess: a rare name, kind, look or thing that the wish left out."""
    low = wish.lower()
    adds = [part for part, words in story.rare.items() if any(word.lower() not in low for word in words)]
    values = Values(story.values)
    values["looks"] = values["who"]
    more = [capitalise(values.fill(_pool(f"add_{part}"), random.random)) for part in adds]
    return fix_articles(" ".join([wish, *more]))


def phrase_wish(random: Random, story: Story) -> str:
    """Wish for this very story."""
    asked, rand = story.asked, random.random
    values = Values(story.values)
    values.update(ask=story.plot.ask, talekind=_pool("talekind"), sort=_pool("sort"),
                  place=values["home"], lverb=_pool("lverb"))  # fmt: skip
    if values["pronoun"] == "they":
        values["he"] = "the hero"
    values["chosen"] = values["looks"]
    is_child = values["kind"] in ("boy", "girl")
    can_be_me = asked.name and not asked.is_pair and (is_child or asked.kind)
    is_me = can_be_me and rand() < (_CHILD_SELF_SHARE if is_child else _SELF_SHARE)
    is_ours = asked.role and not asked.is_pair and not is_me and rand() < _OURS_SHARE
    values["h"] = _hero(random, asked, values)
    if is_me:
        values.update(he="I", him="me", his="my")
    values["m"] = _mate(random, asked, values, story.text) if asked.mate and not asked.is_pair else ""
    if not is_me and rand() < _FORM_SHARE:
        wish = phrase_form(random, asked, values)
    else:
        is_introduced = is_me or is_ours
        sentences = _introduced(random, asked, values, is_me) if is_introduced else _sentences(random, asked, values)
        parts = [part for part in map(str.strip, sentences) if part]
        parts = [capitalise(part) for part in parts] if rand() < 0.9 else parts
        if rand() < 0.15:
            parts.insert(0, values.fill(_pool("wish_before"), rand))
        if not is_me and rand() < 0.2:
            parts.append(capitalise(values.fill(_pool("wish_after"), rand)))
        wish = random.choices((" ", "\n", "\n\n"), (0.88, 0.09, 0.03))[0].join(parts)
    return mistype(random, add_what_is_rare(random, story, fix_articles(wish)))
