"""`--why`: a table on stderr of what every sampler step did to each choice.

It comes at the end, since both streams may be one terminal and the text is to be read in one piece.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from llmcli.cli.output.color import terminal_tints, tinted
from llmcli.cli.output.tokens import NUM_LEVELS, as_many_as_fit, likelihood_level, percent, show_piece
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Token

if TYPE_CHECKING:
    from llmcli.cli.output.base import RunFacts
    from llmcli.engine.events import Event, Finished
    from llmcli.sampling.inspect import StepEffect, TokenProbability

MAX_PIECE_WIDTH = 16
MAX_NOTES = 4  # tokens listed as removed; more are a haystack, and so are those below the next line's probability
MIN_NOTED_PROBABILITY = 0.001
WIDTH_WITHOUT_TERMINAL = 100
HEADINGS = ("#", "token", "model", "step", "chance", "removed", "left")
LEFT_ALIGNED = ("token", "step")
NOTES_HEADING = "likeliest removed, chance before"


@dataclass(frozen=True)
class _Row:
    """A line of the table: what one step did to one choice. Only a choice's first line has the first three cells."""

    cells: tuple[str, str, str, str, str, str, str]
    notes: tuple[str, ...]
    level: int


class WhyOutput:
    """For each token a line for every step that changed something, and one if the draw passed over the likeliest.

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
        """Print a table for each sample, those that Ctrl-C ended included."""
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
        count = len(item.token_ids)
        return ["", f"why{which}: {count} token{'' if count == 1 else 's'}; {rule}"]

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

        Where a narrow terminal has no room for the notes, they stand on a line of their own.
        """
        widths = [max(map(cell_len, column)) for column in zip(HEADINGS, *(row.cells for row in rows), strict=True)]
        room = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns - sum(widths) - 2 * len(widths)
        indent = " " * (widths[0] + 2)
        is_narrow = any(cell_len(row.notes[0]) > room for row in rows if row.notes)
        if is_narrow:
            room += sum(widths[1:]) + 2 * (len(widths) - 1)
        gap = f"\n{indent}" if is_narrow else "  "
        yield tinted("  ".join(_padded(HEADINGS, widths)) + gap + NOTES_HEADING, self._dim)
        for row in rows:
            number, piece, *cells = _padded(row.cells, widths)
            notes = tinted(as_many_as_fit(row.notes, room), self._dim)
            line = "  ".join([number, tinted(piece, self._tints[row.level]), *cells])
            yield f"{line.rstrip() if is_narrow else line}{gap}{notes}" if row.notes else line.rstrip()

    def _piece(self, token_id: int) -> str:
        piece = show_piece(self._facts.tokenizer, token_id)
        if cell_len(piece) <= MAX_PIECE_WIDTH:
            return piece
        return f"{set_cell_size(piece, MAX_PIECE_WIDTH - 1).rstrip()}…"

    def _notes(self, step: StepEffect) -> Iterator[str]:
        """The likeliest token that a step removed, and those that come near it."""
        for index, token in enumerate(step.removed[:MAX_NOTES]):
            if index == 0 or token.probability >= MIN_NOTED_PROBABILITY:
                yield self._note(token)

    def _note(self, token: TokenProbability) -> str:
        return f"{self._piece(token.token_id)} {percent(token.probability)}"

    def _step_name(self, name: str) -> str:
        """A step with the value of the parameter it is named after, where it is named after one."""
        value = vars(self._facts.sampling.params).get(name)
        return name if value is None else f"{name} {value:g}"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    padded = []
    for heading, cell, width in zip(HEADINGS, cells, widths, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if heading in LEFT_ALIGNED else space + cell)
    return padded
