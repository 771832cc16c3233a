"""The page of `diff --html` as text: one model's text, and the other's choice at each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.cli.output.page_kit import PageParts, html_text, render, rounded, skyline, story, token_spans
from llmcli.cli.output.tokens import LEVEL_LIMITS, likelihood_level, percent, shares_of, show_piece
from llmcli.cli.units import counted, divergence
from llmcli.tokenizer.base import decode

if TYPE_CHECKING:
    from llmcli.measure.evaluate import DiffToken, Verdict
    from llmcli.tokenizer.base import Tokenizer

MOST_KL = 1e6  # JSON has no infinity
FEW_TOKENS = 50  # below this a verdict is a hint


@dataclass(frozen=True)
class DiffFacts:
    """What was compared: the names of both models, what they ran on, and the prompt."""

    first: str
    second: str
    device: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    tokenizer: Tokenizer


def render_diff_page(facts: DiffFacts, tokens: Sequence[DiffToken], numbers: Verdict) -> str:
    """The whole page."""
    levels = [0 if token.agrees else likelihood_level(token.second_probability) for token in tokens]
    heights = [math.sqrt(max(token.kl, 0.0)) for token in tokens]
    is_continued = decode(facts.tokenizer, facts.prompt_token_ids, at_start=True) == facts.prompt
    prompt = f'<span class="prompt">{html_text(facts.prompt)}</span>'
    apart = "" if is_continued else f'<section class="message"><h2>Prompt</h2>{story(prompt)}</section>'
    token_ids = [token.token_id for token in tokens]
    text = "".join(
        token_spans(
            facts.tokenizer,
            token_ids,
            shares_of(facts.tokenizer, token_ids, decode(facts.tokenizer, token_ids, at_start=False)),
            "token",
            lambda numbers: _look(facts.tokenizer, [tokens[number] for number in numbers]),
        )
    )
    return render(
        PageParts(
            title=f"{facts.first} and {facts.second}",
            eyebrow="Two models on one text",
            head=_head(facts, numbers),
            legend="Where B would choose another token, by how likely B finds A’s",
            first_level=1,
            main=f'{apart}<section class="sample"><p class="about">The text is A’s; B reads it and is asked at each '
            f"token.</p>{skyline(heights, levels, 'How far apart the models are at each token')}"
            f"{story((prompt if is_continued else '') + text, ' data-sample=1')}</section>",
            panel="diff.html",
            scripts=("diff.js",),
            data=diff_data(facts.tokenizer, tokens),
        )
    )


def diff_data(tokenizer: Tokenizer, tokens: Sequence[DiffToken]) -> dict[str, Any]:
    """What the panel shows, as the script reads it: `first` and `p` are A's and B's probability for A's token.

    An alternative is [id, probability by A, probability by B].
    """
    used = {token.token_id for token in tokens} | {one.token_id for token in tokens for one in token.alternatives}
    used |= {token.second_choice for token in tokens}
    return {
        "levels": LEVEL_LIMITS,
        "pieces": {str(token_id): show_piece(tokenizer, token_id) for token_id in sorted(used)},
        "samples": [
            {
                "number": 1,
                "tokens": [
                    {
                        "id": token.token_id,
                        "first": rounded(token.first_probability),
                        "p": rounded(token.second_probability),
                        "choice": token.second_choice,
                        "kl": rounded(min(token.kl, MOST_KL)),
                        "alternatives": [
                            [one.token_id, rounded(one.first_probability), rounded(one.second_probability)]
                            for one in token.alternatives
                        ],
                    }
                    for token in tokens
                ],
            }
        ],
    }


def verdict_sentence(numbers: Verdict) -> str:
    """The verdict in one sentence, with its numbers."""
    count = counted(numbers.num_tokens, "token")
    if numbers.divergent_probability is None:
        parts = [f"They agree on {'the one token' if numbers.num_tokens == 1 else f'all {count}'}"]
    else:
        share = percent(1 - numbers.num_divergences / numbers.num_tokens)
        parts = [
            f"They agree on {share} of {count}",
            f"where they differ, B gives A’s choice {percent(numbers.divergent_probability)} on average",
        ]
    hint = " (a hint only, from so few tokens)" if numbers.num_tokens < FEW_TOKENS else ""
    return f"{'; '.join([*parts, f'mean KL {divergence(numbers.mean_kl, digits=2)}'])}: {numbers.kinship}{hint}."


def _head(facts: DiffFacts, numbers: Verdict) -> str:
    rows = {
        "tokens before the first difference": str(numbers.num_agreeing),
        "tokens where B would choose another": str(numbers.num_divergences),
        "mean KL divergence, nats a token": divergence(numbers.mean_kl),
        "mean change of a token’s probability": f"{numbers.mean_change:.2%}",
        "run on": facts.device,
    }
    cells = "".join(f'<tr><th scope="row">{name}</th><td>{html_text(value)}</td></tr>' for name, value in rows.items())
    return (
        f'<h1 class="verdict">{html_text(verdict_sentence(numbers))}</h1>'
        f'<p class="models">A: <bdi>{html_text(facts.first)}</bdi><br>B: <bdi>{html_text(facts.second)}</bdi></p>'
        f'<details class="settings"><summary>More figures</summary><table><tbody>{cells}</tbody></table></details>'
    )


def _look(tokenizer: Tokenizer, parts: Sequence[DiffToken]) -> tuple[str, str]:
    """The classes and the title of an element that these tokens wrote."""
    last = parts[-1]
    title = f"A {percent(last.first_probability)}, B {percent(last.second_probability)}"
    apart = [part for part in parts if not part.agrees]
    if not apart:
        return "", title
    level = likelihood_level(min(part.second_probability for part in apart))
    return f"differs l{level}", f"{title}; B would choose {show_piece(tokenizer, apart[0].second_choice)}"
