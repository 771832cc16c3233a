"""What `llmcli kernels roofline` says: tables, a plot, and the sentences that name the gap."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.cli.kernel_report import ceilings_text
from llmcli.cli.roofline_plot import Mark, draw_roofline
from llmcli.cli.tables import format_table
from llmcli.cli.terminal import visible

if TYPE_CHECKING:
    from llmcli.lab.roofline import Ceilings, Gap, Point, StepTimes

_CHARACTERS = string.ascii_letters + string.digits


def roofline_text(
    title: str,
    ceilings: Ceilings,
    steps: Sequence[StepTimes],
    placed: Sequence[Sequence[Point]],
    gaps: Sequence[Gap],
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
    """The marks of all points that have a place on the roofline, and what they are."""
    marks: list[Mark] = []
    labels: list[str] = []
    for points, letters in zip(placed, _characters(placed), strict=True):
        for point, letter in zip(points, letters, strict=True):
            if letter:
                marks.append((letter, point.intensity, point.reached))
                labels.append(" ".join((point.call.launch.stem, point.call.matrix)).strip())
    return marks, labels


def roofline_json(
    title: str,
    ceilings: Ceilings,
    steps: Sequence[StepTimes],
    placed: Sequence[Sequence[Point]],
    gaps: Sequence[Gap],
) -> dict[str, object]:
    """The same as an object; rates in bytes and operations a second."""
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
