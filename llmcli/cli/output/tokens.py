"""The outputs that look at single tokens on a terminal: `--color prob` and `--why`; and code that pages share.

For pages: which token wrote which text, how it is shown, and how likely it was.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size

from llmcli.cli.output.base import Output, RunFacts, TextOutput
from llmcli.cli.tables import padded
from llmcli.cli.terminal import terminal, visible
from llmcli.cli.units import counted
from llmcli.engine.request import Event, Finished, Token
from llmcli.tokenizer.base import StreamDecoder

if TYPE_CHECKING:
    from llmcli.sampling.inspect import StepEffect, TokenProbability
    from llmcli.tokenizer.base import Tokenizer

SPACE, NEWLINE, TAB = "·", "⏎", "⇥"

# Each level begins at its probability; what is below the last one is the least likely of all.
LEVEL_LIMITS = (0.5, 0.2, 0.05, 0.01)
NUM_LEVELS = len(LEVEL_LIMITS) + 1

RESET = "\x1b[0m"

# For each level, likely first, the codes between `ESC[` and `m`. The background is unknown, so the colours
# contrast alike with black and with white: 4.5 or more with true colours, 3.6 or more with 256. They
# run along yellow to blue, which colour-blind people see too, and the least likely is underlined as well.
TRUE_COLORS = ("", "38;2;138;115;0", "38;2;188;88;5", "38;2;230;6;93", "4;38;2;213;3;188")
COLORS_256 = ("", "38;5;94", "38;5;166", "38;5;161", "4;38;5;163")
COLORS_16 = ("", "33", "31", "35", "4;35")  # the terminal's theme decides what these look like

# A line's words with the spaces between them: a tint never touches line breaks or the space before a word.
_INKED = re.compile(r"\S(?:[^\S\n]*\S)*")

MAX_PIECE_WIDTH = 16
MAX_NOTES = 4  # tokens listed as removed; more are hard to read, as are those below the next line's probability
MIN_NOTED_PROBABILITY = 0.001
WIDTH_WITHOUT_TERMINAL = 100
HEADINGS = ("#", "token", "model", "step", "chance", "removed", "left")
SIDES = "><><>>>"
NOTES_HEADING = "likeliest removed, chance before"


class Share(NamedTuple):
    """A part of a sample's text and the tokens that wrote it, numbered from 0: more than one only for a character
    whose bytes are spread over several."""

    token_numbers: tuple[int, ...]
    text: str


class TextShares:
    """Assigns each part of one sample's text to the token that wrote it.

    Text comes late where a character spans tokens or a stop string might begin, and then in the event of a later
    token. A token's bytes show what it can have written, so the text is shared out in that order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, at_start=False)
        self._num_tokens = 0
        self._unfinished: tuple[int, ...] = ()  # tokens whose bytes have not made a character yet
        self._waiting: deque[Share] = deque()  # written, but not yet part of an event

    def push(self, token: Token) -> list[Share]:
        """Take the next token; return which tokens wrote the text of its event."""
        if self._tokenizer.token_bytes(token.token_id):
            self._unfinished += (self._num_tokens,)
            self._wait(self._decoder.push(token.token_id))
        self._num_tokens += 1
        return self._deal_out(token.text)

    def finish(self, tail: str) -> list[Share]:
        """Take the text held back until the end; return which tokens wrote it."""
        self._wait(self._decoder.flush())
        return self._deal_out(tail)

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
        # Nothing is lost if an event holds more than its tokens' bytes.
        return [*shares, Share((), text)] if text else shares

    def _drop_leading_space(self, text: str) -> None:
        """Some tokenizers drop the first space of a separate text: the first token then wrote one less."""
        written = "".join(share.text for share in self._waiting)
        if written.startswith(" ") and not written.startswith(text):
            numbers, first = self._waiting.popleft()
            if rest := first.removeprefix(" "):
                self._waiting.appendleft(Share(numbers, rest))


def shares_of(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[Share]:
    """Which tokens wrote which part of a whole text."""
    shares = TextShares(tokenizer)
    for token_id in token_ids:
        shares.push(Token(0, token_id, ""))
    return shares.finish(text)


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
    """0 for likely to 4 for a surprise: how many limits the probability is below."""
    return sum(probability < limit for limit in LEVEL_LIMITS)


def level_names() -> list[str]:
    """The levels in words, likely first."""
    pairs = zip(LEVEL_LIMITS, LEVEL_LIMITS[1:], strict=False)
    between = [f"{low * 100:.0f}\N{EN DASH}{high:.0%}" for high, low in pairs]
    return [f"over {LEVEL_LIMITS[0]:.0%}", *between, f"under {LEVEL_LIMITS[-1]:.0%}"]


def percent(probability: float) -> str:
    """At most six characters, never 0 or 1 for a probability between them."""
    if 0 < probability < 0.001:
        return "<0.1%"
    if 0.9995 <= probability < 1:
        return ">99.9%"
    return f"{probability:.1%}"


def chosen_probability(token: Token) -> float | None:
    """The model's own probability for the chosen token, or None if not recorded."""
    return None if token.inspection is None else math.exp(token.inspection.chosen.logprob)


def as_many_as_fit(notes: Sequence[str], room: int) -> str:
    """The first notes in a row, at least one, as many as fit on a narrow terminal."""
    text = ""
    for note in notes:
        longer = f"{text}  {note}" if text else note
        if text and cell_len(longer) > room:
            break
        text = longer
    return text


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
    """Writes the text as TextOutput does, tinted, under a legend on stderr.

    Only for a stdout for which `why_no_color` is None.
    """

    is_drawn = True

    def __init__(self, facts: RunFacts):
        super().__init__(facts)
        self._tints = terminal_tints()
        self._shares = {sample: TextShares(facts.tokenizer) for sample in facts.samples}
        self._probabilities: dict[int, list[float | None]] = {sample: [] for sample in facts.samples}
        if sys.stderr.isatty():  # if only stdout is a terminal, a legend in stderr's file explains nothing
            show_legend(self._tints)

    def show(self, event: Event) -> None:
        """Write what the event adds, tinted."""
        if isinstance(event, Finished):
            tail = self._tint(event.sample, self._shares[event.sample].finish(event.tail))
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
            # Bytes of one character depend on each other, so its probability is their product.
            probability = math.prod(value for value in known if value is not None)
            text += tinted(visible(share.text), self._tints[likelihood_level(probability)])
        return text


def show_legend(tints: Sequence[str]) -> None:
    """Say on stderr what the tints mean."""
    names = " · ".join(tinted(name, tint) for name, tint in zip(level_names(), tints, strict=True))
    terminal.info(f"probability of each token: {names}", is_drawn=True)


def terminal_tints() -> tuple[str, ...]:
    """The tints of the levels in as many colours as the terminal says it has."""
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return TRUE_COLORS
    return COLORS_256 if "256color" in os.environ.get("TERM", "") else COLORS_16


def tinted(text: str, tint: str) -> str:
    """The text with its words in a tint. Each run of words ends with a reset, so an interrupt between two writes
    leaves no colour."""
    return _INKED.sub(lambda match: f"\x1b[{tint}m{match[0]}{RESET}", text) if tint else text


@dataclass(frozen=True)
class _Row:
    """A line of the table: what one step did to one choice. Only a choice's first line has the first three cells."""

    cells: tuple[str, str, str, str, str, str, str]
    notes: tuple[str, ...]
    level: int


class WhyOutput(Output):
    """For each token a line for every step that changed something, and one if the draw did not take the likeliest.

    So 50 tokens with the default settings take some 120 lines.
    """

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._tokens: dict[int, list[Token]] = {sample: [] for sample in facts.samples}
        has_color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._tints = terminal_tints() if has_color else ("",) * NUM_LEVELS
        self._dim = "2" if has_color else ""

    def show(self, event: Event) -> None:
        """Collect the choices."""
        if isinstance(event, Token):
            self._tokens[event.sample].append(event)

    def finish(self, finished: list[Finished]) -> None:
        """Print a table for each sample, also for those ended by Ctrl-C."""
        for item in finished:
            rows = [
                row for number, token in enumerate(self._tokens[item.sample], 1) for row in self._rows(number, token)
            ]
            if rows:
                terminal.show("\n".join([*self._caption(item), *self._lines(rows), ""]), is_drawn=True)

    def _caption(self, item: Finished) -> list[str]:
        which = f" sample {item.sample + 1}" if len(self._facts.samples) > 1 else ""
        is_greedy = self._facts.sampling.params.temperature == 0
        rule = "temperature 0 takes the likeliest" if is_greedy else "each was drawn from what its last step left"
        return ["", f"why{which}: {counted(len(item.token_ids), 'token')}; {rule}"]

    def _rows(self, number: int, token: Token) -> Iterator[_Row]:
        """The lines of one choice."""
        if token.inspection is None:
            return
        inspection = token.inspection
        probability = math.exp(inspection.chosen.logprob)
        first = (str(number), self._piece(token.token_id), percent(probability))
        level = likelihood_level(probability)
        last = inspection.steps[-1]
        changing = [step for step in inspection.steps if step.changed]
        if not changing:
            yield _Row((*first, "unchanged", percent(last.chosen_probability), "", f"{last.num_left:,}"), (), level)
            first = ("", "", "")
        for step in changing:
            removed = f"{step.num_removed:,}" if step.num_removed else ""
            cells = (
                *first,
                self._step_name(step.name),
                percent(step.chosen_probability),
                removed,
                f"{step.num_left:,}",
            )
            yield _Row(cells, tuple(self._notes(step)), level)
            first = ("", "", "")
        if last.likeliest.token_id != token.token_id:
            yield _Row(("", "", "", "draw", "", "", ""), (f"passed over {self._note(last.likeliest)}",), level)

    def _lines(self, rows: list[_Row]) -> Iterator[str]:
        """The table with its heading, each column as wide as its widest cell.

        If a narrow terminal has no room for the notes, they go on their own line.
        """
        widths = [max(map(cell_len, column)) for column in zip(HEADINGS, *(row.cells for row in rows), strict=True)]
        room = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns - sum(widths) - 2 * len(widths)
        indent = " " * (widths[0] + 2)
        is_narrow = any(cell_len(row.notes[0]) > room for row in rows if row.notes)
        if is_narrow:
            room += sum(widths[1:]) + 2 * (len(widths) - 1)
        gap = f"\n{indent}" if is_narrow else "  "
        yield tinted("  ".join(map(padded, HEADINGS, widths, SIDES)) + gap + NOTES_HEADING, self._dim)
        for row in rows:
            number, piece, *cells = map(padded, row.cells, widths, SIDES)
            notes = tinted(as_many_as_fit(row.notes, room), self._dim)
            line = "  ".join([number, tinted(piece, self._tints[row.level]), *cells])
            yield f"{line.rstrip() if is_narrow else line}{gap}{notes}" if row.notes else line.rstrip()

    def _piece(self, token_id: int) -> str:
        piece = show_piece(self._facts.tokenizer, token_id)
        if cell_len(piece) <= MAX_PIECE_WIDTH:
            return piece
        return f"{set_cell_size(piece, MAX_PIECE_WIDTH - 1).rstrip()}…"

    def _notes(self, step: StepEffect) -> Iterator[str]:
        """The likeliest tokens that a step removed."""
        for index, token in enumerate(step.removed[:MAX_NOTES]):
            if index == 0 or token.probability >= MIN_NOTED_PROBABILITY:
                yield self._note(token)

    def _note(self, token: TokenProbability) -> str:
        return f"{self._piece(token.token_id)} {percent(token.probability)}"

    def _step_name(self, name: str) -> str:
        """A step, with its parameter's value if it is named after a parameter."""
        value = vars(self._facts.sampling.params).get(name)
        return name if value is None else f"{name} {value:g}"
