"""The page of `--html` as text: its markup, and the data behind the panel.

Whatever comes from prompt, model or path stands in it as escaped text or as JSON. The page loads nothing and, by its
own content security policy, runs nothing but its own script.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from llmcli.cli.output.tokens import LEVEL_LIMITS, Share, level_names, likelihood_level, percent, show_piece
from llmcli.tokenizer.stream import decode

if TYPE_CHECKING:
    from llmcli.cli.output.base import RunFacts
    from llmcli.engine.events import Finished
    from llmcli.sampling.inspect import Inspection, StepEffect, TokenProbability

ENDS = {
    "eos": "ended by the model",
    "stop": "ended at a stop string",
    "length": "ended at the limit of new tokens",
    "context": "ended where the context is full",
    "interrupted": "interrupted",
}
SUMMARIZED = ("temperature", "top_p")  # settings named at the top even where nobody has set them
SKYLINE_BITS = 10.0  # surprise that fills the height of the skyline: one chance in 1,024
SKYLINE_UNIT = 6  # pixels a token where the window has room

# Control characters are no valid text of a page: those that have a picture are shown by it, the others as unknown.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
}


@dataclass(frozen=True)
class Choice:
    """A generated token and the views of its choice."""

    token_id: int
    inspection: Inspection

    @property
    def probability(self) -> float:
        """What the model itself gave the token."""
        return math.exp(self.inspection.chosen.logprob)

    @property
    def drawn_probability(self) -> float:
        """What the token had when it was drawn, after all steps."""
        return self.inspection.steps[-1].chosen_probability


@dataclass(frozen=True)
class PageSample:
    """One sample: its tokens, its text dealt out to them, and its end."""

    choices: Sequence[Choice]
    shares: Sequence[Share]
    finished: Finished


def render_page(facts: RunFacts, samples: Sequence[PageSample]) -> str:
    """The whole page."""
    folder = Path(__file__).parent
    style, script = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    skeleton = Template((folder / "report.html").read_text(encoding="utf-8"))
    # A prompt that the text continues is shown as its beginning; one that a chat template has wrapped stands apart.
    is_continued = decode(facts.tokenizer, facts.prompt_token_ids, at_start=True) == facts.prompt
    prompt = f'<span class="prompt">{_text(facts.prompt)}</span>' if is_continued and facts.prompt else ""
    message = (
        "" if is_continued else f'<section class="message"><h2>Prompt</h2>{_story(_text(facts.prompt))}</section>\n'
    )
    title = " ".join(facts.prompt.split())[:60]
    return skeleton.substitute(
        title=_text(f"{title} · {facts.name}" if title else facts.name),
        style=style,
        style_hash=_content_hash(style),
        script=script,
        script_hash=_content_hash(script),
        model=_text(facts.name),
        summary=_text(_summary(facts)),
        settings="".join(_settings_rows(facts)),
        legend="".join(f'<li class="l{level}">{name}</li>' for level, name in enumerate(level_names())),
        message=message,
        samples="\n".join(_sample_html(facts, sample, prompt) for sample in samples),
        data=_embedded_json(page_data(facts, samples)),
    )


def page_data(facts: RunFacts, samples: Sequence[PageSample]) -> dict[str, Any]:
    """What the panel shows, as the script reads it.

    A token's list of steps holds those that changed something, each as [index in `steps`, number removed, number
    left, the chosen token's probability after it, the likeliest removed tokens]. A token with a probability is
    [id, probability]. Probabilities have four significant digits.
    """
    used: set[int] = set()
    steps = [step.name for sample in samples for choice in sample.choices[:1] for step in choice.inspection.steps]
    names = list(dict.fromkeys(steps))
    params = vars(facts.sampling.params)

    def pair(token_id: int, probability: float) -> list[float]:
        used.add(token_id)
        return [token_id, _rounded(probability)]

    def pairs(tokens: Iterable[TokenProbability]) -> list[list[float]]:
        return [pair(token.token_id, token.probability) for token in tokens]

    def step_data(step: StepEffect) -> list[Any]:
        chance = _rounded(step.chosen_probability)
        return [names.index(step.name), step.num_removed, step.num_left, chance, pairs(step.removed)]

    def token_data(choice: Choice) -> dict[str, Any]:
        inspection = choice.inspection
        first, last = inspection.steps[0], inspection.steps[-1]
        used.add(choice.token_id)
        return {
            "id": choice.token_id,
            "p": _rounded(choice.probability),
            "drawn": _rounded(choice.drawn_probability),
            "of": first.num_left + first.num_removed,
            "alternatives": [pair(other.token_id, math.exp(other.logprob)) for other in inspection.alternatives],
            "steps": [step_data(step) for step in inspection.steps if step.changed],
            "likeliest": pair(last.likeliest.token_id, last.likeliest.probability),
        }

    samples_data = [
        {"number": sample.finished.sample + 1, "tokens": [token_data(choice) for choice in sample.choices]}
        for sample in samples
    ]
    return {
        "is_greedy": facts.sampling.params.temperature == 0,
        "levels": LEVEL_LIMITS,
        "steps": [{"name": name, "value": params.get(name)} for name in names],
        "pieces": {str(token_id): show_piece(facts.tokenizer, token_id) for token_id in sorted(used)},
        "samples": samples_data,
    }


def _embedded_json(value: object) -> str:
    """JSON that no content can end early: inside a script element only "<" begins anything."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(probability: float) -> float:
    return float(f"{probability:.4g}")


def _content_hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _text(text: str) -> str:
    return escape(text.translate(_PICTURES))


def _story(content: str, attributes: str = "") -> str:
    return f'<div class="story" dir="auto"{attributes}>{content}</div>'


def _summary(facts: RunFacts) -> str:
    sources = facts.sampling.sources
    shown = [name for name, source in sources.items() if name in SUMMARIZED or source != "default"]
    params = vars(facts.sampling.params)
    return " · ".join([f"seed {facts.seed}", *(f"{name} {params[name]}" for name in shown)])


def _settings_rows(facts: RunFacts) -> Iterator[str]:
    rows = [("seed", facts.seed, ""), ("prompt", f"{len(facts.prompt_token_ids)} tokens", "")]
    for name, value, source in [*rows, *facts.sampling.rows()]:
        yield f'<tr><th scope="row">{name}</th><td>{_text(str(value))}</td><td>{_text(source)}</td></tr>'


def _sample_html(facts: RunFacts, sample: PageSample, prompt: str) -> str:
    number = sample.finished.sample + 1
    is_only = len(facts.samples) == 1
    prefix = "token" if is_only else f"sample-{number}-token"
    heading = "" if is_only else f"<h2>Sample {number}</h2>"
    return (
        f'<section class="sample">{heading}<p class="about">{_about(sample)}</p>{_skyline(sample.choices)}'
        f"{_story(prompt + ''.join(_token_spans(facts, sample, prefix)), f' data-sample={number}')}</section>"
    )


def _about(sample: PageSample) -> str:
    count = len(sample.choices)
    words = [f"{count} token{'' if count == 1 else 's'}", ENDS[sample.finished.finish_reason]]
    if count:
        bits = sum(map(_surprise_bits, sample.choices)) / count
        words.append(f"{bits:.1f} bits of surprise a token")
    return ", ".join(words)


def _surprise_bits(choice: Choice) -> float:
    return abs(choice.inspection.chosen.logprob) / math.log(2)  # abs: of a certain token it is -0.0


def _skyline(choices: Sequence[Choice]) -> str:
    """The surprise of every token in a row, a path for each level; nothing if there are no tokens."""
    if not choices:
        return ""
    paths = [""] * (len(LEVEL_LIMITS) + 1)
    for index, choice in enumerate(choices):
        height = max(100 * min(_surprise_bits(choice) / SKYLINE_BITS, 1), 2)
        paths[likelihood_level(choice.probability)] += f"M{index} 100v-{height:.0f}h.8v{height:.0f}z"
    drawn = "".join(f'<path class="l{level}" d="{path}"/>' for level, path in enumerate(paths) if path)
    return (
        f'<svg class="skyline" role="img" aria-label="The surprise of each token" viewBox="0 0 {len(choices)} 100" '
        f'preserveAspectRatio="none" width="{SKYLINE_UNIT * len(choices)}" height="48">{drawn}</svg>'
    )


def _token_spans(facts: RunFacts, sample: PageSample, prefix: str) -> Iterator[str]:
    """The text in an element for each token, and a chip for a token that is no part of the text."""
    texts: dict[tuple[int, ...], str] = {}
    for share in sample.shares:
        texts[share.token_numbers] = texts.get(share.token_numbers, "") + share.text
    writers = {numbers[-1]: numbers for numbers in texts if numbers}
    seen = {number for numbers in texts for number in numbers}
    for number, choice in enumerate(sample.choices):
        numbers = writers.get(number, (number,))
        if number in seen and number not in writers:
            continue  # a part of a character, which stands where its last part is
        # Bytes of one character depend on each other, so it is as likely as all of them in a row.
        level = likelihood_level(math.prod(sample.choices[part].probability for part in numbers))
        names, text = f"t l{level}", texts.get(numbers)
        if text is None:
            names, text = f"{names} unseen", show_piece(facts.tokenizer, choice.token_id)
        elif text.strip(" ") and not text.strip():
            names = f"{names} break"
        title = f"{percent(choice.probability)} by the model, {percent(choice.drawn_probability)} when drawn"
        place = f'id="{prefix}-{number + 1}" data-n="{number + 1}"'
        # The white space around a word stays outside, so that a tint is as wide as the word.
        begin, word, end = _split_ink(text)
        yield f'{_text(begin)}<span class="{names}" {place} title="{escape(title)}">{_text(word)}</span>{_text(end)}'


def _split_ink(text: str) -> tuple[str, str, str]:
    """Text without the white space around it, between that; white space alone counts as text."""
    word = text.strip() or text
    begin = text.index(word)
    return text[:begin], word, text[begin + len(word) :]
