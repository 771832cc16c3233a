"""The plots: story skeletons written in the template language, in the text files of `text/plots`.

A plot is a block of lines. `plot NAME` begins it; `ask` phrases what a listener may ask for; `let x = ...` binds a
value for the whole story; `- ...` is one way of telling a beat; `/` ends a beat, `//` also ends the paragraph;
`~ out` allows a line of scenery there; `close` tells the last paragraph; `end` opens the other endings;
`q key: questions => answers` asks for a fact.

A thread runs alongside a plot: what its `open` says of the hero's days, its `close` answers at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .grammar import slots_in
from .paraphrase import loosen
from .phrases import POOLS, read_text, text_names


@dataclass(slots=True)
class Question:
    """A question about one fact of a story, with its phrasings and its answers."""

    key: str
    ask: list
    answer: list


@dataclass(slots=True)
class Beat:
    """One step of a plot: several ways to tell it, and the scenery that may follow."""

    tellings: list[list] = field(default_factory=list)
    scenery: str = ""
    ends_paragraph: bool = False


@dataclass(slots=True)
class Plot:
    """One story shape."""

    name: str
    ask: list = field(default_factory=list)
    lets: dict[str, list] = field(default_factory=dict)
    beats: list[Beat] = field(default_factory=list)
    endings: list[list] = field(default_factory=list)
    closes: list[list] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def tellings(self) -> Iterator[list]:
        """All that a story of this plot may tell."""
        for beat in self.beats:
            yield from beat.tellings
        yield from self.closes

    def order_lets(self) -> None:
        """Sort the bindings so that each comes after those it uses."""
        ordered: dict[str, list] = {}

        def visit(name: str) -> None:
            if name in self.lets and name not in ordered:
                for other in sorted(slots_in(self.lets[name]) - {name}):
                    visit(other)
                ordered[name] = self.lets[name]

        for name in self.lets:
            visit(name)
        self.lets = ordered


@dataclass(slots=True)
class Thread:
    """Something of the hero's days, opened at the beginning and answered at the end."""

    name: str
    lets: dict[str, list] = field(default_factory=dict)
    opens: list[list] = field(default_factory=list)
    closes: list[list] = field(default_factory=list)


def parse_question(line: str) -> Question:
    """Parse `key: questions => answers`."""
    key, _, body = line.partition(": ")
    ask, _, answer = body.partition(" => ")
    return Question(key, POOLS.parse(f"[{ask.strip()}]"), POOLS.parse(f"[{answer.strip()}]"))


def parse_plots(text: str) -> list[Plot]:
    """Parse a file's worth of plots.

    Raises:
        ValueError: a line is none of the known forms.
    """
    plots: list[Plot] = []
    is_ending = False
    for line in text.strip().splitlines():
        word, _, rest = line.partition(" ")
        if not line.strip():
            continue
        if word == "plot":
            plots.append(Plot(rest))
            plots[-1].beats.append(Beat())
            is_ending = False
        elif word == "ask":
            plots[-1].ask = POOLS.parse(f"[{rest}]")
        elif word == "let":
            name, _, value = rest.partition(" = ")
            plots[-1].lets[name] = POOLS.parse(value)
        elif word == "-":
            telling = POOLS.parse(loosen(rest.strip()))
            if is_ending:
                plots[-1].endings.append(telling)
            else:
                plots[-1].beats[-1].tellings.append(telling)
        elif word in ("/", "//"):
            plots[-1].beats[-1].ends_paragraph = word == "//"
            plots[-1].beats.append(Beat())
        elif word == "close":
            plots[-1].closes.append(POOLS.parse(loosen(rest)))
        elif word == "~":
            plots[-1].beats[-1].scenery = rest
        elif word == "end":
            is_ending = True
        elif word == "q":
            plots[-1].questions.append(parse_question(rest))
        else:
            raise ValueError(f"not a line of a plot: {line}")
    for plot in plots:
        plot.order_lets()
    return plots


def parse_threads(text: str) -> list[Thread]:
    """Parse the file of threads."""
    threads: list[Thread] = []
    for line in text.strip().splitlines():
        word, _, rest = line.partition(" ")
        if word == "thread":
            threads.append(Thread(rest))
        elif word == "let":
            name, _, value = rest.partition(" = ")
            threads[-1].lets[name] = POOLS.parse(value)
        elif word == "open":
            threads[-1].opens.append(POOLS.parse(loosen(rest)))
        elif word == "close":
            threads[-1].closes.append(POOLS.parse(loosen(rest)))
        else:
            raise ValueError(f"not a line of a thread: {line}")
    return threads


PLOTS: tuple[Plot, ...] = tuple(plot for name in text_names("plots") for plot in parse_plots(read_text(name)))
THREADS: tuple[Thread, ...] = tuple(parse_threads(read_text("threads.txt")))
