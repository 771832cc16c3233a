"""Tells one story: casts the characters, renders a plot in its frame, and records its facts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from .casting import NOTHING, Asked, cast, is_common
from .grammar import Values, fix_articles, slots_in
from .phrases import POOLS
from .plots import PLOTS, THREADS, Plot, Thread
from .sentences import repeated_sentences

THREAD_SHARE = 0.5
LAST_SHARE = 0.25
SCENERY_SHARE = 0.08

# How often a friend who goes along is heard of at the end of a paragraph.
MATE_SHARE = 0.75
# Of the stories of two that were asked for: the friend goes along, and does not come up in the plot.
ALONG_SHARE = 0.5
PLACE_SHARE = 0.5

_OPEN, _CLOSE, _LAST, _MATE_OPEN, _MATE_LINE, _MATE_CLOSE, _PLACE_LINE = (
    POOLS.parse(f"{{@{name}}}")
    for name in ("open", "close", "last", "mate_open", "mate_line", "mate_close", "place_line")
)
_SCENERY = {name: POOLS.parse(f"{{@{name}}}") for name in ("out", "night", "in")}
_SPACES = re.compile(r" +(?=[ ,.?!])")


@dataclass(slots=True)
class Story:
    """A story with all that was fixed while telling it."""

    shape: str
    text: str
    facts: dict[str, str]
    values: Values
    plot: Plot
    asked: Asked

    @property
    def rare(self) -> dict[str, tuple[str, ...]]:
        """What no list holds, by what of the story it is: a request must name it."""
        values = self.values
        named = {
            "name": (values["name"],),
            "thing": (values["thing"],),
            "kind": (values["kind"], *values["looks"]),
            "mate": (values["friend"], values["friendkind"].removeprefix("other "), *values["friendlooks"]),
        }
        rare = {part: tuple(word for word in words if not is_common(word)) for part, words in named.items()}
        return {part: words for part, words in rare.items() if words and (part != "mate" or self.asked.mate)}


_FACTS = (
    "name", "kind", "pronoun", "thing", "thing_full", "colour", "friend", "friendkind", "elder", "helper",
    "helper_name", "feel", "home",
)  # fmt: skip

# In these no friend comes up, so one may go along from the beginning.
_ALONE = tuple(
    plot for plot in PLOTS
    if not any(name.startswith("friend") for told in (*plot.tellings(), *plot.lets.values()) for name in slots_in(told))
)  # fmt: skip
_SOCIABLE = tuple(plot for plot in PLOTS if plot not in _ALONE)
# Of somebody who lives alone, or has a friend of another name.
_LONELY_THREADS = ("two_chairs",)
_SHARED_THREADS = tuple(thread for thread in THREADS if thread.name not in _LONELY_THREADS)
# So often a friend must be named for a request to ask for both.
_LEAST_MENTIONS = 3
# Paragraphs in which the friend comes up, with what it is.
_EARLY = 2


def _render(random: Random, plot: Plot, thread: Thread | None, values: Values, has_mate: bool, is_placed: bool) -> str:
    """Render the opening, the beats of the plot, and the ending that answers the opening.

    A mate goes along with the hero from the opening on; a place that was asked for is spoken of once more.
    """
    rand = random.random
    paragraphs = [[values.fill(_OPEN, rand)], []]
    if is_placed and rand() < PLACE_SHARE:
        paragraphs[0].append(values.fill(_PLACE_LINE, rand))
    if thread:
        paragraphs[0].append(values.fill(thread.opens[int(rand() * len(thread.opens))], rand))
    if has_mate:
        paragraphs[0].append(values.fill(_MATE_OPEN, rand))
    for beat in plot.beats:
        paragraphs[-1].append(values.fill(beat.tellings[int(rand() * len(beat.tellings))], rand))
        if beat.scenery and rand() < SCENERY_SHARE:
            paragraphs[-1].append(values.fill(_SCENERY[beat.scenery], rand))
        if beat.ends_paragraph:
            if has_mate and rand() < MATE_SHARE:
                paragraphs[-1].append(values.fill(_MATE_LINE, rand))
            paragraphs.append([])
    closes = thread.closes if thread else plot.closes or [_CLOSE]
    paragraphs.append([values.fill(closes[int(rand() * len(closes))], rand)])
    if has_mate:
        paragraphs[-1].append(values.fill(_MATE_CLOSE, rand))
    elif rand() < LAST_SHARE:
        paragraphs[-1].append(values.fill(_LAST, rand))
    text = "\n\n".join(" ".join(filter(None, map(str.strip, parts))) for parts in paragraphs if parts)
    return fix_articles(_SPACES.sub("", text))


def tell_ending(random: Random, story: Story) -> str:
    """Tell another ending of a story."""
    return fix_articles(story.values.fill(random.choice(story.plot.endings), random.random))


def _has_both(text: str, values: Values) -> bool:
    """Tell whether the friend is named often enough, and early with the kind, so that a request may ask for both."""
    is_often = len(re.findall(rf"\b{re.escape(values['friend'])}\b", text)) >= _LEAST_MENTIONS
    begins = "\n\n".join(text.split("\n\n", _EARLY)[:_EARLY])
    return is_often and values["friend"] in begins and values["friendkind"] in begins


def tell(random: Random, split: str = "train", plot: Plot | None = None, asked: Asked = NOTHING) -> Story:
    """Tell a story of the given split, of a random shape unless a plot is given, with all that will be asked for."""
    given, plots = plot, PLOTS
    if asked.mate:
        plots = _ALONE if asked.is_hers or random.random() < ALONG_SHARE else _SOCIABLE
    while True:
        plot = given or random.choice(plots)
        has_mate = asked.mate and plot in _ALONE
        thread = random.choice(_SHARED_THREADS if has_mate else THREADS) if random.random() < THREAD_SHARE else None
        values = cast(random, plot, thread, split, asked)
        text = _render(random, plot, thread, values, has_mate, asked.place)
        if repeated_sentences(text) or (asked.mate and not _has_both(text, values)):
            continue
        facts = {key: values[key] for key in (*_FACTS, *plot.lets)}
        facts["trait"] = " ".join(values["looks"])
        facts["mate"] = values["friend"] if has_mate else ""
        facts["friend_who"] = values["matelooks"] if values["friend"] in text else ""
        return Story(plot.name, text, facts, values, plot, asked)
