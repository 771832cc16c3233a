"""What the outputs that look at single tokens share: whose text it is, how it is shown, how likely it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len

from llmcli.tokenizer.base import StreamDecoder

if TYPE_CHECKING:
    from llmcli.engine.events import Finished, Token
    from llmcli.tokenizer.base import Tokenizer

SPACE, NEWLINE, TAB = "·", "⏎", "⇥"

# Each level begins at its probability; what is below the last one is the least likely of all.
LEVEL_LIMITS = (0.5, 0.2, 0.05, 0.01)
NUM_LEVELS = len(LEVEL_LIMITS) + 1


class Share(NamedTuple):
    """A part of a sample's text and the tokens that wrote it, numbered from 0: more than one only for a character
    whose bytes are spread over several."""

    token_numbers: tuple[int, ...]
    text: str


class TextShares:
    """Gives each part of one sample's text back to the token that wrote it.

    Text comes late where a character spans tokens or a stop string might begin, and then in the event of a later
    token. What a token can have written is known from its bytes, so the text is dealt out in that order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, at_start=False)
        self._num_tokens = 0
        self._unfinished: tuple[int, ...] = ()  # tokens whose bytes have not made a character yet
        self._waiting: deque[Share] = deque()  # written, but not yet part of an event

    def push(self, token: Token) -> list[Share]:
        """Take the next token; return whose the text of its event is."""
        if self._tokenizer.token_bytes(token.token_id):
            self._unfinished += (self._num_tokens,)
            self._wait(self._decoder.push(token.token_id))
        self._num_tokens += 1
        return self._deal_out(token.text)

    def finish(self, finished: Finished) -> list[Share]:
        """Take the end; return whose the text is that was held back until now."""
        self._wait(self._decoder.flush())
        return self._deal_out(finished.tail)

    def _wait(self, text: str) -> None:
        if text:
            self._waiting.append(Share(self._unfinished, text))
            self._unfinished = ()

    def _deal_out(self, text: str) -> list[Share]:
        self._drop_leading_space(text)
        shares: list[Share] = []
        while text and self._waiting:
            numbers, written = self._waiting.popleft()
            shares.append(Share(numbers, text[: len(written)]))
            if rest := written[len(text) :]:
                self._waiting.appendleft(Share(numbers, rest))
            text = text[len(written) :]
        # Nothing is lost, should an event ever hold more than its tokens' bytes.
        return [*shares, Share((), text)] if text else shares

    def _drop_leading_space(self, text: str) -> None:
        """Of a text that stands alone, some tokenizers drop the first space: then the first token wrote one less."""
        written = "".join(share.text for share in self._waiting)
        if written.startswith(" ") and not written.startswith(text):
            numbers, first = self._waiting.popleft()
            if rest := first.removeprefix(" "):
                self._waiting.appendleft(Share(numbers, rest))


def show_piece(tokenizer: Tokenizer, token_id: int) -> str:
    """A token in one printable line: `·the` with its space, `⏎` for a line break, `\\xf0` for half a character."""
    if content := tokenizer.token_bytes(token_id):
        text = content.decode(errors="backslashreplace")
    else:
        text = tokenizer.piece(token_id)  # a special token, which adds nothing to the text
    return show_text(text) or f"[{token_id}]"


def show_text(text: str) -> str:
    """Text in one printable line. A space between two words stays as it is, any other becomes visible."""
    inner = text.strip(" ")
    begin = len(text) - len(text.lstrip(" ")) if inner else len(text)
    end = len(text) - begin - len(inner)
    inner = inner.replace("  ", SPACE * 2)
    return SPACE * begin + "".join(map(_show_character, inner)) + SPACE * end


def _show_character(character: str) -> str:
    if character in ("\n", "\t"):
        return NEWLINE if character == "\n" else TAB
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def likelihood_level(probability: float) -> int:
    """0 for likely to 4 for a surprise: how many limits the probability stays below."""
    return sum(probability < limit for limit in LEVEL_LIMITS)


def level_names() -> list[str]:
    """The levels in words, likely first."""
    pairs = zip(LEVEL_LIMITS, LEVEL_LIMITS[1:], strict=False)
    between = [f"{low * 100:.0f}\N{EN DASH}{high:.0%}" for high, low in pairs]
    return [f"over {LEVEL_LIMITS[0]:.0%}", *between, f"under {LEVEL_LIMITS[-1]:.0%}"]


def percent(probability: float) -> str:
    """At most six characters, which never claim certainty or impossibility where there is none."""
    if 0 < probability < 0.001:
        return "<0.1%"
    if 0.9995 <= probability < 1:
        return ">99.9%"
    return f"{probability:.1%}"


def chosen_probability(token: Token) -> float | None:
    """What the model itself gave the chosen token, or None if nobody looked."""
    return None if token.inspection is None else math.exp(token.inspection.chosen.logprob)


def as_many_as_fit(notes: Sequence[str], room: int) -> str:
    """The first notes in a row, at least one, so that a narrow terminal breaks no line that need not be broken."""
    text = ""
    for note in notes:
        longer = f"{text}  {note}" if text else note
        if text and cell_len(longer) > room:
            break
        text = longer
    return text
