"""A text in a notebook, tinted as on a page of `--html`, but small: it has no script and no style outside its element.

The tints are those of a terminal, which contrast alike with light and with dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.cli.output.page_kit import html_text, story, token_spans
from llmcli.cli.output.tokens import NUM_LEVELS, TRUE_COLORS, level_names, likelihood_level, percent, shares_of

if TYPE_CHECKING:
    from llmcli.tokenizer.base import Tokenizer

_STYLE = (
    ".llmcli .story{white-space:pre-wrap;overflow-wrap:anywhere}.llmcli .unseen{opacity:.6;font-size:.8em}"
    f".llmcli .l{NUM_LEVELS - 1}{{text-decoration:underline}}"
)


def text_html(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """The element. Each token is tinted by its probability, and says it under the pointer.

    Without log-probabilities the text has no tints.
    """
    if not logprobs:
        return f'<div class="llmcli"><style>{_STYLE}</style>{story(html_text(text))}</div>'

    def look(numbers: Sequence[int]) -> tuple[str, str]:
        # Bytes of one character depend on each other, so its probability is their product.
        probability = math.exp(sum(logprobs[number] for number in numbers))
        return f"l{likelihood_level(probability)}", percent(probability)

    spans = token_spans(tokenizer, token_ids, shares_of(tokenizer, token_ids, text), "token", look)
    colors = [code.split(";")[-3:] for code in TRUE_COLORS[1:]]
    rules = [f".llmcli .l{level}{{background:rgb({' '.join(rgb)}/30%)}}" for level, rgb in enumerate(colors, start=1)]
    style = "".join([_STYLE, *rules])
    names = " · ".join(f'<span class="l{level}">{name}</span>' for level, name in enumerate(level_names()))
    return f'<div class="llmcli"><style>{style}</style>{story("".join(spans))}<small>{names}</small></div>'
