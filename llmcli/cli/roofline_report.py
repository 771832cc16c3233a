"""The report of `llmcli kernels roofline`: tables, a plot in plain characters, and the sentences that name the gap.

The plot has operations a byte to the right and operations a second upwards, in decades.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmcli.cli.kernel_report import ceilings_text
from llmcli.cli.tables import format_table
from llmcli.cli.terminal import visible

if TYPE_CHECKING:
    from llmcli.lab.roofline import Ceilings, Gap, Point, TimedStep

WIDTH, HEIGHT = 60, 20  # of the whole plot
_LABEL_WIDTH = 8
_COLUMNS, _ROWS = WIDTH - _LABEL_WIDTH - 1, HEIGHT - 2
_WRITTEN_OUT = 3  # decades whose zeros are written; later ones would touch each other
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))

Mark = tuple[str, float, float]  # a character, operations a byte, operations a second

_CHARACTERS = string.ascii_letters + string.digits


def draw_roofline(marks: Sequence[Mark], read_bytes: float, flops: Mapping[str, float]) -> str:
    """The roofs `/` and `-` with their names, and the marks over them. All numbers are positive.

    Of marks in one place the first is shown.
    """
    xs = [x for _, x, _ in marks] + [rate / read_bytes for rate in flops.values()]
    left, right = _decades(min(xs), max(xs))
    # Every roof gets as long as its name.
    longest = 2 + max(map(len, flops))
    while (right - math.log10(max(flops.values()) / read_bytes)) / (right - left) * _COLUMNS < longest:
        right += 1
    ys = [y for _, _, y in marks] + [*flops.values(), read_bytes * 10.0**left]
    bottom, top = _decades(min(ys), max(ys))

    def column(x: float) -> int:
        return round((math.log10(x) - left) / (right - left) * (_COLUMNS - 1))

    def row(y: float) -> int:
        return round((math.log10(y) - bottom) / (top - bottom) * (_ROWS - 1))

    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    highest = max(flops.values())
    for place in range(_COLUMNS):
        rate = read_bytes * 10 ** (left + place / (_COLUMNS - 1) * (right - left))
        if rate <= highest:
            grid[row(rate)][place] = "/"
    for name, rate in sorted(flops.items(), key=lambda one: one[1]):
        line, begin = grid[row(rate)], column(rate / read_bytes)
        line[begin:] = "-" * (_COLUMNS - begin)
        line[-len(name) - 1 :] = f" {name}"
    for character, x, y in reversed(marks):
        grid[row(y)][column(x)] = character
    lines = []
    for number in reversed(range(_ROWS)):
        is_decade = any(row(10.0**decade) == number for decade in range(bottom, top + 1))
        label = _rate(10.0 ** round(bottom + number / (_ROWS - 1) * (top - bottom))) if is_decade else ""
        lines.append(f"{label:>{_LABEL_WIDTH}}|{''.join(grid[number])}")
    lines.append(" " * _LABEL_WIDTH + "+" + "-" * _COLUMNS)
    axis = [" "] * (_LABEL_WIDTH + 1 + _COLUMNS)
    for decade in range(left, right + 1):
        text = f"{10.0**decade:g}" if abs(decade) <= _WRITTEN_OUT else f"1e{decade}"
        begin = min(_LABEL_WIDTH + 1 + column(10.0**decade), len(axis) - len(text))
        axis[begin : begin + len(text)] = text
    lines.append("".join(axis))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _decades(low: float, high: float) -> tuple[int, int]:
    """Whole decades around a range, at least one."""
    first = math.floor(math.log10(low))
    return first, max(math.ceil(math.log10(high)), first + 1)


def _rate(per_second: float) -> str:
    for unit, prefix in _PREFIXES:
        if per_second >= unit:
            return f"{per_second / unit:g}{prefix}"
    return f"{per_second:g}"


def roofline_text(
    title: str, ceilings: Ceilings, steps: Sequence[TimedStep], placed: Sequence[Sequence[Point]], gaps: Sequence[Gap]
) -> str:
    """Ceilings, a table for each step, the plot of all, and a sentence for each step."""
    parts = [f"{visible(title)}\n{ceilings_text(ceilings)}\n"]
    characters = _characters(placed)
    for step, points, letters in zip(steps, placed, characters, strict=True):
        parts.append(f"{step.walk.title}\n{_table(points, letters)}")
    marks, _ = placed_marks(placed)
    plot = draw_roofline(marks, ceilings.read_bytes, ceilings.flops)
    parts.append(f"Operations a second over operations a byte\n{plot}")
    parts.append("".join(f"{gap_text(gap, ceilings)}\n" for gap in gaps))
    return "\n".join(parts)


def gap_text(gap: Gap, ceilings: Ceilings) -> str:
    """One sentence: the ceiling, what is reached, and which kernel holds the gap."""
    fact = (
        f"{gap.title}: at {ceilings.read_bytes / 1e9:,.0f} GB/s the ceilings allow {gap.least * 1e6:,.1f} us, and it "
        f"takes {gap.whole * 1e6:,.1f} us, {gap.least / gap.whole:.1%} of the ceiling"
    )
    total = sum(gap.lost.values())
    if total <= 0:
        return f"{fact}; no kernel is below its ceiling."
    stem, seconds = next(iter(gap.lost.items()))
    return f"{fact}; of what its kernels lose, {stem} loses {seconds / total:.0%}, {seconds * 1e6:,.1f} us."


def placed_marks(placed: Sequence[Sequence[Point]]) -> tuple[list[Mark], list[str]]:
    """The marks of all points on the roofline, and their meaning."""
    marks: list[Mark] = []
    labels: list[str] = []
    for points, letters in zip(placed, _characters(placed), strict=True):
        for point, letter in zip(points, letters, strict=True):
            if letter:
                marks.append((letter, point.intensity, point.reached))
                labels.append(" ".join((point.call.launch.stem, point.call.matrix)).strip())
    return marks, labels


def roofline_json(
    title: str, ceilings: Ceilings, steps: Sequence[TimedStep], placed: Sequence[Sequence[Point]], gaps: Sequence[Gap]
) -> dict[str, object]:
    """The report as an object; rates in bytes and operations a second."""
    return {
        "title": title,
        "read_bytes_per_second": ceilings.read_bytes,
        "operations_per_second": dict(ceilings.flops),
        "steps": [
            {
                "title": step.walk.title,
                "calls": [
                    {
                        "kernel": point.call.launch.stem,
                        "name": point.call.name,
                        "matrix": point.call.matrix,
                        "operations_per_byte": point.intensity,
                        "reached": point.reached,
                        "ceiling": point.ceiling,
                        "ceiling_share": point.share,
                    }
                    for point in points
                ],
                "least_seconds": gap.least,
                "median_seconds": gap.whole,
                "lost_seconds": dict(gap.lost),
            }
            for step, points, gap in zip(steps, placed, gaps, strict=True)
        ],
    }


def _table(points: Sequence[Point], letters: Sequence[str]) -> str:
    header = ("MARK", "KERNEL", "MATRIX", "OPERATIONS A BYTE", "GFLOP/s", "CEILING", "OF CEILING")
    rows = []
    for point, letter in zip(points, letters, strict=True):
        figures = ("-", "-", "-")
        if letter:
            figures = (f"{point.intensity:.3g}", f"{point.reached / 1e9:,.1f}", f"{point.ceiling / 1e9:,.1f}")
        rows.append((letter or "-", point.call.launch.stem, point.call.matrix, *figures, f"{point.share:.1%}"))
    return format_table(header, rows)


def _characters(placed: Sequence[Sequence[Point]]) -> list[list[str]]:
    """A character for each point that computes, in the order of the tables; empty for one that only moves."""
    left = iter(_CHARACTERS)
    return [[next(left, "*") if point.intensity > 0 else "" for point in points] for points in placed]
