"""`--color prob`: the text with each token tinted by the probability the model gave it, for a terminal."""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcli.cli.output.text import TextOutput
from llmcli.cli.output.tokens import Share, TextShares, chosen_probability, level_names, likelihood_level
from llmcli.cli.terminal import terminal, visible
from llmcli.engine.events import Finished, Token

if TYPE_CHECKING:
    from llmcli.cli.output.base import RunFacts
    from llmcli.engine.events import Event

RESET = "\x1b[0m"

# For each level, likely first, what stands between `ESC[` and `m`. Nothing is known of the background, so the colours
# are those that contrast alike with black and with white: 4.5 or more with true colours, 3.6 or more with 256. They
# run along yellow to blue, which colour-blind people see too, and the least likely is underlined as well.
TRUE_COLORS = ("", "38;2;138;115;0", "38;2;188;88;5", "38;2;230;6;93", "4;38;2;213;3;188")
COLORS_256 = ("", "38;5;94", "38;5;166", "38;5;161", "4;38;5;163")
COLORS_16 = ("", "33", "31", "35", "4;35")  # the terminal's theme decides what these look like

# A line's words with the spaces between them: a tint never touches line breaks or the space before a word.
_INKED = re.compile(r"\S(?:[^\S\n]*\S)*")


def why_no_color() -> str | None:
    """Why stdout gets no colour, as a line for the user, or None if it does."""
    if not sys.stdout.isatty():
        reason = "stdout is not a terminal"
    elif os.environ.get("NO_COLOR"):
        reason = "NO_COLOR is set"
    elif os.environ.get("TERM") == "dumb":
        reason = "TERM is dumb"
    else:
        return None
    return f"--color prob: {reason}, so the text stays plain; --html FILE shows the probabilities anywhere"


class ColorOutput(TextOutput):
    """The text as TextOutput writes it, tinted, under a legend on stderr.

    Only for a stdout that `why_no_color` has no objection to.
    """

    is_drawn = True

    def __init__(self, facts: RunFacts):
        super().__init__(facts)
        self._tints = terminal_tints()
        self._shares = {sample: TextShares(facts.tokenizer) for sample in facts.samples}
        self._probabilities: dict[int, list[float | None]] = {sample: [] for sample in facts.samples}
        if sys.stderr.isatty():  # it may be a file though stdout is a terminal, and there a legend explains nothing
            names = [tinted(name, tint) for name, tint in zip(level_names(), self._tints, strict=True)]
            terminal.info(f"probability of each token: {' · '.join(names)}", is_drawn=True)

    def show(self, event: Event) -> None:
        """Write what the event adds, tinted."""
        if isinstance(event, Finished):
            tail = self._tint(event.sample, self._shares[event.sample].finish(event))
            event = replace(event, tail=tail)
        super().show(event)

    def style(self, token: Token) -> str:
        """The text of the token's event, each part in the tint of the token that wrote it."""
        self._probabilities[token.sample].append(chosen_probability(token))
        return self._tint(token.sample, self._shares[token.sample].push(token))

    def _tint(self, sample: int, shares: list[Share]) -> str:
        text = ""
        for share in shares:
            known = [self._probabilities[sample][number] for number in share.token_numbers]
            # Bytes of one character depend on each other, so it is as likely as all of them in a row.
            probability = math.prod(value for value in known if value is not None)
            text += tinted(visible(share.text), self._tints[likelihood_level(probability)])
        return text


def terminal_tints() -> tuple[str, ...]:
    """The tints of the levels in as many colours as the terminal says it has."""
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return TRUE_COLORS
    return COLORS_256 if "256color" in os.environ.get("TERM", "") else COLORS_16


def tinted(text: str, tint: str) -> str:
    """The text with its words in a tint. Each run of words ends with a reset, so an interrupt between two writes
    leaves no colour behind."""
    return _INKED.sub(lambda match: f"\x1b[{tint}m{match[0]}{RESET}", text) if tint else text
