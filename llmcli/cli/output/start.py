"""`--stats start`: where the time from the start of the process to the first token went, on stderr."""

from __future__ import annotations

import math
from typing import Any

from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, PrefillProgress, Token
from llmcli.timeline import Part, Timeline

BAR_CELLS = 40
_SHADES = " ░▒▓█"
_SHORTEST = 0.0005  # of a part with a row of its own; a figure of milliseconds would say 0.000


class StartOutput:
    """A table at the end, one row a part; nothing if no token came."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._begin = timeline.now()

    def show(self, event: Event) -> None:
        """Take the times of the prompt and of the first token; the timeline ends there."""
        timeline = self._timeline
        if timeline.end is not None:
            return
        if isinstance(event, PrefillProgress) and event.num_computed > 0:
            timeline.since("prefill", self._begin)
        elif isinstance(event, Token):
            timeline.since("first sample", self._begin)
            timeline.finish()
        self._begin = timeline.now()

    def finish(self, finished: list[Finished]) -> None:
        """Print the table."""
        for line in start_table(self._timeline):
            terminal.show(f"{line}\n")


def start_table(timeline: Timeline) -> list[str]:
    """The lines of the table; none before the timeline has ended."""
    end = timeline.end
    if end is None:
        return []
    counted = [part for part in timeline.parts if not part.is_beside]
    shown = [part for part in timeline.parts if part.seconds >= _SHORTEST]
    other = timeline.other_seconds + sum(part.seconds for part in counted if part not in shown)
    rows = [_row(part, end) for part in shown]
    rows.append(("other", "", f"{other:.3f} s", f"{other / end:.1%}", ""))
    rows.append(("start to first token", "", f"{end:.3f} s", "100.0%", ""))
    rows.insert(0, ("part", "begins", "takes", "share", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {begins:>{widths[1]}}  {takes:>{widths[2]}}  {share:>{widths[3]}}  {bar}".rstrip()
        for name, begins, takes, share, bar in rows
    ]
    if any(part.is_beside for part in shown):
        lines.append("beside: done by another thread meanwhile, not in the sum")
    largest = max(counted, key=lambda part: part.seconds)
    lines.append(f"largest part: {largest.name}, {largest.seconds:.3f} s of {end:.3f} s ({largest.seconds / end:.1%})")
    return lines


def start_json(timeline: Timeline) -> dict[str, Any] | None:
    """The same for programs; None before the timeline has ended."""
    if timeline.end is None:
        return None
    return {
        "seconds": timeline.end,
        "parts": [
            {
                "name": part.name,
                "note": part.note,
                "beside": part.is_beside,
                "begin_seconds": part.begin,
                "seconds": part.seconds,
            }
            for part in timeline.parts
        ],
        "other_seconds": timeline.other_seconds,
    }


def _row(part: Part, end: float) -> tuple[str, str, str, str, str]:
    name = f"{part.name} ({part.note})" if part.note else part.name
    share = "beside" if part.is_beside else f"{part.seconds / end:.1%}"
    return name, f"{part.begin:.3f} s", f"{part.seconds:.3f} s", share, _bar(part, end)


def _bar(part: Part, end: float) -> str:
    """When the part ran: the darker a cell, the more of its time."""
    covered = [0.0] * BAR_CELLS
    for begin, stop in part.intervals:
        first, last = begin / end * BAR_CELLS, min(stop / end, 1.0) * BAR_CELLS
        for cell in range(int(first), min(int(last) + 1, BAR_CELLS)):
            covered[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    # Whatever ran in a cell shows in it.
    return "".join(_SHADES[min(math.ceil(share * 4), 4)] for share in covered).rstrip()
