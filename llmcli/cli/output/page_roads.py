"""The roads of a page: a list below each text, and what the script needs to show one in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcli.cli.output.page_kit import html_text, rounded
from llmcli.cli.output.tokens import percent, show_piece

if TYPE_CHECKING:
    from llmcli.engine.roads import Road, RoadToken
    from llmcli.tokenizer.base import Tokenizer

ROAD_ENDS = {
    "sentence": "",
    "tokens": "…",
    "eos": "the model would have ended here",
    "stop": "a stop string would have ended it here",
    "context": "the context would have been full here",
    "interrupted": "interrupted",
    "failed": "no token could be chosen here",
}


def road_data(tokenizer: Tokenizer, road: Road) -> dict[str, Any]:
    """A road as the script reads it: its place and token, the chance of that, and each word as [text, probability].

    A token without text, such as the end of the text, has its piece and a 1 as a third value.
    """
    return {
        "place": road.fork.place,
        "id": road.fork.token_id,
        "chance": rounded(road.fork.probability),
        "words": [_word(tokenizer, token) for token in road.tokens],
        "end": ROAD_ENDS[road.end],
    }


def roads_html(tokenizer: Tokenizer, drawn: Sequence[int], roads: Sequence[Road]) -> str:
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
            f"<span>token {place + 1}: <s>{html_text(taken)}</s> → "
            f"<b>{html_text(show_piece(tokenizer, begin.token_id))}</b></span> "
            f'<span class="amount">{percent(road.fork.probability)}</span></button>'
            f'<p class="road-text" dir="auto"><b>{html_text(begin.text.lstrip())}</b>{html_text(text)}{end}</p></li>'
        )
    return (
        '<section class="roads"><h2>Roads not taken</h2>'
        '<p class="about">Of the tokens that were not drawn these were the likeliest: the chance of each, and where '
        "the text would have gone behind it with the same seed.</p>"
        f"<ol>{''.join(items)}</ol></section>"
    )


def _word(tokenizer: Tokenizer, token: RoadToken) -> list[Any]:
    probability = rounded(token.probability)
    if tokenizer.token_bytes(token.token_id):
        return [token.text, probability]
    return [show_piece(tokenizer, token.token_id), probability, 1]
