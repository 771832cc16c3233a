"""`--html FILE`: one self-contained page with the tinted text and, for each token, its alternatives.

Roads, continuations that the text did not take, are a list below it. Refuses to replace what is not such a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.cli import lazy
from llmcli.cli.output import page_kit as kit
from llmcli.cli.output.base import Output, RunFacts
from llmcli.cli.output.tokens import LEVEL_LIMITS, Share, TextShares, likelihood_level, percent, show_piece
from llmcli.cli.terminal import terminal
from llmcli.cli.units import counted
from llmcli.engine.request import Event, Finished, Token
from llmcli.tokenizer.base import decode

ROAD_ENDS = {
    "sentence": "",
    "tokens": "…",
    "eos": "the model would have ended here",
    "stop": "a stop string would have ended it here",
    "context": "the context would have been full here",
    "interrupted": "interrupted",
    "failed": "no token could be chosen here",
}

ENDS = {
    "eos": "ended by the model",
    "stop": "ended at a stop string",
    "length": "ended at the limit of new tokens",
    "context": "ended where the context is full",
    "interrupted": "interrupted",
}
SUMMARIZED = ("temperature", "top_p")  # settings named at the top even if not set
SKYLINE_BITS = 10.0  # surprise that fills the height of the skyline: one chance in 1,024


def road_data(tokenizer: lazy.tokenizer.Tokenizer, road: lazy.roads.Road) -> dict[str, Any]:
    """A road as the script reads it: place, token, its probability, and each word as [text, probability].

    A token without text, such as the end of the text, has its piece and a 1 as a third value.
    """
    return {
        "place": road.fork.place,
        "id": road.fork.token_id,
        "chance": kit.rounded(road.fork.probability),
        "words": [_word(tokenizer, token) for token in road.tokens],
        "end": ROAD_ENDS[road.end],
    }


def roads_html(tokenizer: lazy.tokenizer.Tokenizer, drawn: Sequence[int], roads: Sequence[lazy.roads.Road]) -> str:
    """The roads that leave the text of the ids `drawn`, in the order of their places; nothing if there are none."""
    if not roads:
        return ""
    items = []
    for number, road in sorted(enumerate(roads), key=lambda item: (item[1].fork.place, item[0])):
        place, begin = road.fork.place, road.tokens[0]
        taken = show_piece(tokenizer, drawn[place])
        text = "".join(token.text for token in road.tokens[1:]).rstrip()
        end = f' <span class="road-end">{ROAD_ENDS[road.end]}</span>' if ROAD_ENDS[road.end] else ""
        items.append(
            f'<li><button type="button" class="road-link" data-road="{number}">'
            f"<span>token {place + 1}: <s>{kit.html_text(taken)}</s> → "
            f"<b>{kit.html_text(show_piece(tokenizer, begin.token_id))}</b></span> "
            f'<span class="amount">{percent(road.fork.probability)}</span></button>'
            f'<p class="road-text" dir="auto"><b>{kit.html_text(begin.text.lstrip())}</b>'
            f"{kit.html_text(text)}{end}</p></li>"
        )
    return (
        '<section class="roads"><h2>Roads not taken</h2>'
        '<p class="about">Of the tokens that were not drawn these were the likeliest: the chance of each, and where '
        "the text would have gone after it with the same seed.</p>"
        f"<ol>{''.join(items)}</ol></section>"
    )


def _word(tokenizer: lazy.tokenizer.Tokenizer, token: lazy.roads.RoadToken) -> list[Any]:
    probability = kit.rounded(token.probability)
    if tokenizer.token_bytes(token.token_id):
        return [token.text, probability]
    return [show_piece(tokenizer, token.token_id), probability, 1]


@dataclass(frozen=True)
class PageToken:
    """A generated token and the views of its choice."""

    token_id: int
    inspection: lazy.inspect.Inspection

    @property
    def probability(self) -> float:
        """The model's own probability for the token."""
        return math.exp(self.inspection.chosen.logprob)

    @property
    def drawn_probability(self) -> float:
        """The token's probability at the draw, after all steps."""
        return self.inspection.steps[-1].chosen_probability


@dataclass(frozen=True)
class PageSample:
    """One sample: its tokens, its text shared out among them, its end, and the roads that leave it."""

    choices: Sequence[PageToken]
    shares: Sequence[Share]
    finished: Finished
    roads: Sequence[lazy.roads.Road] = ()


def render_page(facts: RunFacts, samples: Sequence[PageSample]) -> str:
    """The whole page."""
    # A prompt that the text continues is shown as its beginning; one wrapped in a chat template is shown apart.
    is_continued = decode(facts.tokenizer, facts.prompt_token_ids, at_start=True) == facts.prompt
    prompt = f'<span class="prompt">{kit.html_text(facts.prompt)}</span>' if is_continued and facts.prompt else ""
    message = (
        ""
        if is_continued
        else f'<section class="message"><h2>Prompt</h2>{kit.story(kit.html_text(facts.prompt))}</section>\n'
    )
    title = " ".join(facts.prompt.split())[:60]
    return kit.render(
        kit.PageParts(
            title=f"{title} · {facts.name}" if title else facts.name,
            eyebrow="Token by token",
            head=_head(facts),
            legend="How likely the model found each token",
            main=message + "\n".join(_sample_html(facts, sample, prompt) for sample in samples),
            panel="choices.html",
            scripts=("roads.js", "choices.js"),
            data=page_data(facts, samples),
        )
    )


def page_data(facts: RunFacts, samples: Sequence[PageSample]) -> dict[str, Any]:
    """What the panel shows, as the script reads it.

    A token's list of steps holds those that changed something, each as [index in `steps`, number removed, number
    left, the chosen token's probability after it, the likeliest removed tokens]. A token with a probability is
    [id, probability]. Probabilities have four significant digits.
    """
    used: set[int] = set()
    steps = [step.name for sample in samples for choice in sample.choices for step in choice.inspection.steps]
    names = list(dict.fromkeys(steps))  # a forced end has its own steps
    params = vars(facts.sampling.params)

    def pair(token_id: int, probability: float) -> list[float]:
        used.add(token_id)
        return [token_id, kit.rounded(probability)]

    def pairs(tokens: Iterable[lazy.inspect.TokenProbability]) -> list[list[float]]:
        return [pair(token.token_id, token.probability) for token in tokens]

    def step_data(step: lazy.inspect.StepEffect) -> list[Any]:
        chance = kit.rounded(step.chosen_probability)
        return [names.index(step.name), step.num_removed, step.num_left, chance, pairs(step.removed)]

    def token_data(choice: PageToken) -> dict[str, Any]:
        inspection = choice.inspection
        first, last = inspection.steps[0], inspection.steps[-1]
        used.add(choice.token_id)
        return {
            "id": choice.token_id,
            "p": kit.rounded(choice.probability),
            "drawn": kit.rounded(choice.drawn_probability),
            "of": first.num_left + first.num_removed,
            "alternatives": [pair(other.token_id, math.exp(other.logprob)) for other in inspection.alternatives],
            "steps": [step_data(step) for step in inspection.steps if step.changed],
            "likeliest": pair(last.likeliest.token_id, last.likeliest.probability),
        }

    samples_data = [
        {
            "number": sample.finished.sample + 1,
            "tokens": [token_data(choice) for choice in sample.choices],
            "roads": [road_data(facts.tokenizer, road) for road in sample.roads],
        }
        for sample in samples
    ]
    used.update(road.fork.token_id for sample in samples for road in sample.roads)
    return {
        "is_greedy": facts.sampling.params.temperature == 0,
        "levels": LEVEL_LIMITS,
        "steps": [{"name": name, "value": params.get(name)} for name in names],
        "pieces": {str(token_id): show_piece(facts.tokenizer, token_id) for token_id in sorted(used)},
        "samples": samples_data,
    }


def _head(facts: RunFacts) -> str:
    return (
        f"<h1><bdi>{kit.html_text(facts.name)}</bdi></h1>"
        f'<details class="settings"><summary>{kit.html_text(_summary(facts))}</summary><table>'
        '<thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">From</th></tr></thead>'
        f"<tbody>{''.join(_settings_rows(facts))}</tbody></table></details>"
    )


def _summary(facts: RunFacts) -> str:
    sources = facts.sampling.sources
    shown = [name for name, source in sources.items() if name in SUMMARIZED or source != "default"]
    params = vars(facts.sampling.params)
    return " · ".join([f"seed {facts.seed}", *(f"{name} {params[name]}" for name in shown)])


def _settings_rows(facts: RunFacts) -> Iterator[str]:
    rows = [("seed", facts.seed, ""), ("prompt", f"{len(facts.prompt_token_ids)} tokens", "")]
    for name, value, source in [*rows, *facts.sampling.rows()]:
        cells = "".join(f"<td>{kit.html_text(str(one))}</td>" for one in (value, source))
        yield f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _sample_html(facts: RunFacts, sample: PageSample, prompt: str) -> str:
    number = sample.finished.sample + 1
    is_only = len(facts.samples) == 1
    prefix = "token" if is_only else f"sample-{number}-token"
    drawn = [choice.token_id for choice in sample.choices]
    heading = "" if is_only else f"<h2>Sample {number}</h2>"
    return (
        f'<section class="sample">{heading}<p class="about">{_about(sample)}</p>{_skyline(sample.choices)}'
        f"{kit.story(prompt + ''.join(_token_spans(facts, sample, prefix)), f' data-sample={number}')}"
        f"{roads_html(facts.tokenizer, drawn, sample.roads)}</section>"
    )


def _about(sample: PageSample) -> str:
    count = len(sample.choices)
    words = [counted(count, "token"), ENDS[sample.finished.finish_reason]]
    if count:
        bits = sum(map(_surprise_bits, sample.choices)) / count
        words.append(f"{bits:.1f} bits of surprise a token")
    return ", ".join(words)


def _surprise_bits(choice: PageToken) -> float:
    return abs(choice.inspection.chosen.logprob) / math.log(2)  # abs: -0.0 for a certain token


def _skyline(choices: Sequence[PageToken]) -> str:
    heights = [_surprise_bits(choice) / SKYLINE_BITS for choice in choices]
    return kit.skyline(
        heights, [likelihood_level(choice.probability) for choice in choices], "The surprise of each token"
    )


def _token_spans(facts: RunFacts, sample: PageSample, prefix: str) -> Iterator[str]:
    forks = {road.fork.place for road in sample.roads}

    def look(numbers: Sequence[int]) -> tuple[str, str]:
        # Bytes of one character depend on each other, so its probability is their product.
        level = likelihood_level(math.prod(sample.choices[part].probability for part in numbers))
        choice = sample.choices[numbers[-1]]
        title = f"{percent(choice.probability)} by the model, {percent(choice.drawn_probability)} when drawn"
        return f"l{level}" if forks.isdisjoint(numbers) else f"l{level} fork", title

    token_ids = [choice.token_id for choice in sample.choices]
    return kit.token_spans(facts.tokenizer, token_ids, sample.shares, prefix, look)


FindRoads = Callable[["Mapping[int, Sequence[lazy.inspect.Inspection]]"], "Sequence[lazy.roads.Road]"]


class HtmlOutput(Output):
    """Collects the events and writes the page at the end; after Ctrl-C with what there is by then.

    `find_roads` follows the roads that leave whole texts, given their choices by sample.
    Raises: UsageError if `path` cannot be written, or holds a page and `replace` is false.
    """

    def __init__(self, facts: RunFacts, path: Path, *, replace: bool, find_roads: FindRoads = lambda texts: ()):
        kit.PAGE.check(path, replace=replace)
        self._find_roads = find_roads
        self._facts = facts
        self._path = path
        self._replace = replace
        self._choices: dict[int, list[PageToken]] = {sample: [] for sample in facts.samples}
        self._text_shares = {sample: TextShares(facts.tokenizer) for sample in facts.samples}
        self._shares: dict[int, list[Share]] = {sample: [] for sample in facts.samples}

    def show(self, event: Event) -> None:
        """Collect a token, or the end of a sample."""
        if isinstance(event, Token):
            assert event.inspection is not None, "the page needs a request with num_alternatives"
            self._choices[event.sample].append(PageToken(event.token_id, event.inspection))
            self._shares[event.sample] += self._text_shares[event.sample].push(event)
        elif isinstance(event, Finished):
            self._shares[event.sample] += self._text_shares[event.sample].finish(event.tail)

    def finish(self, finished: list[Finished]) -> None:
        """Write the page, if anything was generated.

        Raises: OutputError if the disk is full; UsageError if the folder is gone, or something else is there now.
        """
        if not finished:
            return
        roads: Sequence[lazy.roads.Road] = ()
        if all(item.finish_reason != "interrupted" for item in finished):
            roads = self._find_roads(
                {item.sample: [choice.inspection for choice in self._choices[item.sample]] for item in finished}
            )
        samples = [
            PageSample(
                self._choices[item.sample],
                self._shares[item.sample],
                item,
                [road for road in roads if road.fork.sample == item.sample],
            )
            for item in finished
        ]
        kit.write_page(self._path, render_page(self._facts, samples), replace=self._replace)
        terminal.info(f"page: {self._path}")
