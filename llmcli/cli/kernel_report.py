"""The reports of `llmcli kernels compare`, `list`, `bench` and `roofline`: tables, JSON and CSV.

For a study: times, use of a multiprocessor by rung, verdicts on the claims. For a model: its launches, and the
roofline: a plot in plain characters, operations a byte to the right and operations a second upwards, in decades.
"""

from __future__ import annotations

import math
import string
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.cli.tables import csv_text, format_table
from llmcli.cli.terminal import fact_lines, visible
from llmcli.cli.units import size

if TYPE_CHECKING:
    from llmcli.kernels.spec import KernelSpec
    from llmcli.lab.compare import Finding, Measured
    from llmcli.lab.roofline import Ceilings, Gap, Point, TimedStep
    from llmcli.lab.study import Study
    from llmcli.lab.walk import Call, KernelUse, Walk

_USE = ("BLOCKS", "THREADS", "REGISTERS", "SHARED", "SPILLS", "OCCUPANCY", "LIMITED BY")
_LEAST_SHOWN = 0.1  # below it for all rungs, a rate says nothing about the study

LIBRARY = "cublas"
_LIBRARY_OP = "tokens times a matrix, by CUDA's matrix library"
_NAME_WIDTH = 25  # of the longest kernel's name, and two spaces
_MILLION = 1e6


@dataclass(frozen=True)
class _Rate:
    """A rate in billions a second; 0 where nothing was measured."""

    name: str
    count: Callable[[Measured], int]

    def of(self, one: Measured) -> float:
        return self.count(one) / one.times.median / 1e9 if one.times else 0.0


_GIGABYTES = _Rate("GB/s", lambda one: one.num_bytes)
_GIGAFLOPS = _Rate("GFLOP/s", lambda one: one.num_operations)


def study_text(study: Study, measured: Sequence[Measured]) -> str:
    """The tables of a study, on a card that was measured, or of an architecture alone."""
    parts = [times_table(measured)] if measured[0].times is not None else []
    return "\n".join([*parts, use_table([one for one in measured if one.sizes == measured[-1].sizes])])


def times_table(measured: Sequence[Measured]) -> str:
    """Microseconds by rung and sizes."""
    all_sizes = _distinct(measured)
    constant, varying = _split(all_sizes)
    caption = ", ".join(["Microseconds", *(f"{name} {number:,}" for name, number in constant.items())])
    header = ("RUNG", *(" x ".join(f"{sizes[name]:,}" for name in varying) or "TIME" for sizes in all_sizes))
    rows = []
    for rung in dict.fromkeys(one.rung for one in measured):
        times = [one.times for one in measured if one.rung == rung and one.times is not None]
        rows.append((rung, *(f"{1e6 * time.median:.2f}" for time in times)))
    over = f", by {' x '.join(varying)}" if varying else ""
    return f"{caption}{over}\n{format_table(header, rows)}"


def use_table(measured: Sequence[Measured]) -> str:
    """The rates of the rungs and their use of a multiprocessor, at one choice of sizes."""
    rates = [rate for rate in (_GIGABYTES, _GIGAFLOPS) if any(rate.of(one) >= _LEAST_SHOWN for one in measured)]
    header = ("RUNG", *(rate.name for rate in rates), *_USE)
    rows = []
    for one in measured:
        reached = [f"{rate.of(one):,.1f}" for rate in rates]
        for number, use in enumerate(one.uses or (None,)):
            first = (one.rung, *reached) if number == 0 else ("", *("" for _ in reached))
            rows.append((*first, *_use_cells(use)))
    sizes = ", ".join(f"{name} {number:,}" for name, number in measured[0].sizes.items())
    intensity = measured[0].num_operations / measured[0].num_bytes
    note = f": {intensity:,.1f} operations for each byte that has to be moved" if _GIGAFLOPS in rates else ""
    return f"At {sizes}{note}\n{format_table(header, rows)}"


def finding_text(finding: Finding) -> str:
    """One sentence, with the numbers of this card."""
    claim = finding.claim
    sizes = ", ".join(f"{name} {number:,}" for name, number in finding.sizes.items())
    fact = (
        f"{claim.faster} is {finding.ratio:.2f} times as fast as {claim.slower} "
        f"({1e6 * finding.faster_seconds:.2f} us, {1e6 * finding.slower_seconds:.2f} us) at {sizes}"
    )
    return f"{fact}: {claim.reason}." if finding.holds else f"Not here, though {claim.reason}: {fact}."


def as_json(study: Study, device: str, arch: str, measured: Sequence[Measured], findings: Sequence[Finding]) -> object:
    """All of it, in seconds and bytes."""
    return {
        "study": study.name,
        "device": device,
        "arch": arch,
        "rungs": [_json_of(one) for one in measured],
        "claims": [
            {
                "faster": one.claim.faster,
                "slower": one.claim.slower,
                "sizes": dict(one.sizes),
                "reason": one.claim.reason,
                "ratio": one.ratio,
                "holds": one.holds,
            }
            for one in findings
        ],
    }


def as_csv(measured: Sequence[Measured]) -> str:
    """One line for each rung and choice of sizes."""
    columns = ("rung", *measured[0].sizes, "median_seconds", "fastest_seconds", "bytes", "operations")
    return csv_text(columns, ({**_json_of(one), **one.sizes} for one in measured))


def _json_of(one: Measured) -> dict[str, object]:
    return {
        "rung": one.rung,
        "sizes": dict(one.sizes),
        "median_seconds": one.times.median if one.times else None,
        "fastest_seconds": one.times.fastest if one.times else None,
        "bytes": one.num_bytes,
        "operations": one.num_operations,
        "kernels": [use_json(use) for use in one.uses],
    }


def use_json(use: KernelUse) -> dict[str, object]:
    """A launch's use of a multiprocessor."""
    return {
        "name": use.name,
        "blocks": use.num_blocks,
        "threads": use.block,
        "registers": use.resources.registers,
        "shared_bytes": use.shared_bytes,
        "spill_bytes": use.spill_bytes,
        "blocks_per_multiprocessor": use.occupancy.blocks,
        "occupancy": use.occupancy.share,
        "limited_by": list(use.occupancy.limits),
    }


def _use_cells(use: KernelUse | None) -> tuple[str, ...]:
    """A launch's use, in the columns `_USE`."""
    if use is None:
        return ("-",) * len(_USE)
    return (
        f"{use.num_blocks:,}",
        f"{use.block}",
        f"{use.resources.registers}",
        size(use.shared_bytes),
        size(use.spill_bytes),
        f"{use.occupancy.share:.0%}",
        ", ".join(use.occupancy.limits),
    )


def _distinct(measured: Sequence[Measured]) -> list[Mapping[str, int]]:
    found: list[Mapping[str, int]] = []
    for one in measured:
        if one.sizes not in found:
            found.append(one.sizes)
    return found


def _split(all_sizes: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], list[str]]:
    """The sizes that are the same everywhere, and the names of the others."""
    names = list(all_sizes[0])
    constant = {name: all_sizes[0][name] for name in names if len({sizes[name] for sizes in all_sizes}) == 1}
    return constant, [name for name in names if name not in constant]


def list_text(title: str, walks: Sequence[Walk], kernels: Mapping[str, KernelSpec]) -> str:
    """All kernels, and a table for each step."""
    launched = {stem for walk in walks for stem, _ in walk.labels}
    parts = [f"{visible(title)}\n", _ops_text([spec for spec in kernels.values() if spec.stem in launched])]
    if LIBRARY in launched:
        parts[-1] += _named_lines([(LIBRARY, _LIBRARY_OP)])
    parts += [f"{walk.title}: {len(walk.labels)} launches\n{_use_table(walk)}" for walk in walks]
    others = [spec for spec in kernels.values() if spec.stem not in launched]
    parts.append(f"Not launched in these steps:\n{_ops_text(others)}")
    return "\n".join(parts)


def list_json(
    model: str, arch: str, num_multiprocessors: int, walks: Sequence[Walk], kernels: Mapping[str, KernelSpec]
) -> dict[str, object]:
    """The list as an object."""
    launched = {stem for walk in walks for stem, _ in walk.labels}
    return {
        "model": model,
        "arch": arch,
        "num_multiprocessors": num_multiprocessors,
        "kernels": [
            {"kernel": spec.stem, "op": spec.op, "variants": list(spec.variants), "is_launched": spec.stem in launched}
            for spec in kernels.values()
        ],
        "steps": [{"title": walk.title, "calls": [_call_json(call) for call in walk.calls]} for walk in walks],
    }


def bench_text(title: str, steps: Sequence[TimedStep], ceilings: Ceilings, names: Collection[str]) -> str:
    """A table for each step; of the kernels `names` only, if there are any."""
    parts = [f"{visible(title)}\n{ceilings_text(ceilings)}\n"]
    for step in steps:
        if table := _time_table(step, ceilings, names):
            parts.append(f"{step.walk.title}\n{table}")
            parts[-1] += (
                f"the whole step takes {step.whole.median * 1e6:,.1f} us; "
                f"its launches, each timed beside its like, add up to {step.alone_seconds * 1e6:,.1f} us\n"
            )
    return "\n".join(parts)


def ceilings_text(ceilings: Ceilings) -> str:
    """The card's measured rates, in a line."""
    rates = ", ".join(f"{rate / 1e12:,.1f} in {kind}" for kind, rate in ceilings.flops.items())
    reads = f"reads {ceilings.read_bytes / 1e9:,.1f} GB/s"
    return f"ceilings: {reads}; large products do {rates} (trillion operations a second)"


def bench_json(
    model: str, device: str, arch: str, steps: Sequence[TimedStep], ceilings: Ceilings, names: Collection[str]
) -> dict[str, object]:
    """The report as an object, in seconds and bytes."""
    return {
        "model": model,
        "device": device,
        "arch": arch,
        "read_bytes_per_second": ceilings.read_bytes,
        "operations_per_second": dict(ceilings.flops),
        "steps": [
            {
                "title": step.walk.title,
                "median_seconds": step.whole.median,
                "alone_seconds": step.alone_seconds,
                "calls": list(_timed_calls(step, ceilings, names)),
            }
            for step in steps
        ],
    }


def bench_csv(steps: Sequence[TimedStep], ceilings: Ceilings, names: Collection[str]) -> str:
    """One line for each call."""
    columns = ("step", "kernel", "name", "matrix", "launches", "bytes", "operations")
    calls = ({"step": step.walk.title, **call} for step in steps for call in _timed_calls(step, ceilings, names))
    return csv_text((*columns, "median_seconds", "fastest_seconds", "ceiling_share"), calls)


def _timed_calls(step: TimedStep, ceilings: Ceilings, names: Collection[str]) -> Iterator[dict[str, object]]:
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        if _is_chosen(call, names):
            share = ceilings.least_seconds(call) / times.median
            seconds = {"median_seconds": times.median, "fastest_seconds": times.fastest}
            yield {**_call_json(call), **seconds, "ceiling_share": share}


def _ops_text(specs: Sequence[KernelSpec]) -> str:
    return _named_lines(
        (spec.stem, f"{spec.op} ({len(spec.variants)} variant{'s' if len(spec.variants) > 1 else ''})")
        for spec in specs
    )


def _named_lines(rows: Iterable[tuple[str, str]]) -> str:
    return fact_lines(rows, _NAME_WIDTH, sys.stdout)


def _use_table(walk: Walk) -> str:
    header = (*("KERNEL", "MATRIX", "LAUNCHES", *_USE[:5], "HELD", *_USE[5:], "BYTES", "OPERATIONS"),)
    rows, shorts = [], _short_names(walk.calls)
    for call in walk.calls:
        taken, held = _use_cells(call.use), "-" if call.use is None else f"{call.use.occupancy.blocks}"
        moved = size(call.num_bytes), _millions(call.cost.flops)
        rows.append((shorts[call.name], call.matrix, f"{len(call.places)}", *taken[:5], held, *taken[5:], *moved))
    return format_table(header, rows) + _names_text(walk.calls)


def _time_table(step: TimedStep, ceilings: Ceilings, names: Collection[str]) -> str:
    header = (
        *("KERNEL", "MATRIX", "LAUNCHES", "BYTES", "OPERATIONS"),
        *("US", "GB/s", "GFLOP/s", "OF CEILING", "OF THE STEP"),
    )
    rows, shorts = [], _short_names(step.walk.calls)
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        if _is_chosen(call, names):
            seconds = times.median
            rows.append(
                (
                    shorts[call.name],
                    call.matrix,
                    f"{len(call.places)}",
                    size(call.num_bytes),
                    _millions(call.cost.flops),
                    f"{seconds * 1e6:,.2f}",
                    f"{call.num_bytes / seconds / 1e9:,.1f}",
                    f"{call.cost.flops / seconds / 1e9:,.1f}",
                    f"{ceilings.least_seconds(call) / seconds:.1%}",
                    f"{seconds * len(call.places) / step.alone_seconds:.1%}",
                )
            )
    chosen = [call for call in step.walk.calls if _is_chosen(call, names)]
    return format_table(header, rows) + _names_text(step.walk.calls, chosen) if rows else ""


def _short_names(calls: Sequence[Call]) -> dict[str, str]:
    """A short name for each name expression: the kernel's, with a number where a step has several of its variants."""
    variants: dict[str, list[str]] = {}
    for call in calls:
        names = variants.setdefault(call.launch.stem, [])
        if call.name not in names:
            names.append(call.name)
    return {
        name: stem if len(names) == 1 else f"{stem} {number}"
        for stem, names in variants.items()
        for number, name in enumerate(names, start=1)
    }


def _names_text(calls: Sequence[Call], shown: Sequence[Call] | None = None) -> str:
    """The full names for a table's short names, where they differ."""
    shorts, names = _short_names(calls), dict.fromkeys(call.name for call in (calls if shown is None else shown))
    return _named_lines((shorts[name], name) for name in names if shorts[name] != name)


def _is_chosen(call: Call, names: Collection[str]) -> bool:
    return not names or call.launch.stem in names


def _call_json(call: Call) -> dict[str, object]:
    return {
        "kernel": call.launch.stem,
        "name": call.name,
        "matrix": call.matrix,
        "launches": len(call.places),
        "bytes": call.num_bytes,
        "operations": call.cost.flops,
        "use": None if call.use is None else use_json(call.use),
    }


def _millions(number: float) -> str:
    return f"{number / _MILLION:,.1f} M" if number else "0"


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
