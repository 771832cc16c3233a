"""What `llmcli kernels list` and `bench` say of a model's launches: tables, JSON, CSV."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from llmcli.cli.study_report import use_json
from llmcli.cli.tables import format_table
from llmcli.cli.terminal import fact_lines, visible
from llmcli.cli.units import size

if TYPE_CHECKING:
    from llmcli.kernels.spec import KernelSpec
    from llmcli.lab.roofline import Ceilings
    from llmcli.lab.step_times import StepTimes
    from llmcli.lab.walk import Call, Walk

LIBRARY = "cublas"
_LIBRARY_OP = "tokens times a matrix, by CUDA's matrix library"
_NAME_WIDTH = 19  # of the longest kernel's name, and two spaces
_MILLION = 1e6


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
    """The same as an object."""
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


def bench_text(title: str, steps: Sequence[StepTimes], ceilings: Ceilings, names: Collection[str]) -> str:
    """A table for each step; of the kernels `names` only, if there are any."""
    parts = [f"{visible(title)}\n{ceilings_text(ceilings)}\n"]
    for step in steps:
        if table := _time_table(step, ceilings, names):
            parts.append(f"{step.walk.title}\n{table}")
            parts[-1] += f"{_whole_text(step)}\n"
    return "\n".join(parts)


def ceilings_text(ceilings: Ceilings) -> str:
    """What the card was measured to reach, in a line."""
    rates = ", ".join(f"{rate / 1e12:,.1f} in {kind}" for kind, rate in ceilings.flops.items())
    reads = f"reads {ceilings.read_bytes / 1e9:,.1f} GB/s"
    return f"ceilings: {reads}; large products do {rates} (trillion operations a second)"


def bench_json(
    model: str, device: str, arch: str, steps: Sequence[StepTimes], ceilings: Ceilings, names: Collection[str]
) -> dict[str, object]:
    """The same as an object, in seconds and bytes."""
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
                "calls": [
                    {
                        **_call_json(call),
                        "median_seconds": times.median,
                        "fastest_seconds": times.fastest,
                        "ceiling_share": ceilings.least_seconds(call) / times.median,
                    }
                    for call, times in zip(step.walk.calls, step.calls, strict=True)
                    if _is_chosen(call, names)
                ],
            }
            for step in steps
        ],
    }


def bench_csv(steps: Sequence[StepTimes], ceilings: Ceilings, names: Collection[str]) -> str:
    """One line for each call."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("launches", "bytes", "operations", "median_seconds", "fastest_seconds", "ceiling_share")
    writer.writerow(["step", "kernel", "name", "matrix", *columns])
    for step in steps:
        for call, times in zip(step.walk.calls, step.calls, strict=True):
            if _is_chosen(call, names):
                share = ceilings.least_seconds(call) / times.median
                figures = (len(call.places), call.num_bytes, call.cost.flops, times.median, times.fastest, share)
                writer.writerow([step.walk.title, call.launch.stem, call.name, call.matrix, *figures])
    return text.getvalue()


def _ops_text(specs: Sequence[KernelSpec]) -> str:
    return _named_lines(
        (spec.stem, f"{spec.op} ({len(spec.variants)} variant{'s' if len(spec.variants) > 1 else ''})")
        for spec in specs
    )


def _named_lines(rows: Iterable[tuple[str, str]]) -> str:
    return fact_lines(rows, _NAME_WIDTH, sys.stdout)


def _use_table(walk: Walk) -> str:
    header = (
        *("KERNEL", "MATRIX", "LAUNCHES", "BLOCKS", "THREADS", "REGISTERS", "SHARED", "SPILLS"),
        *("HELD", "OCCUPANCY", "LIMITED BY", "BYTES", "OPERATIONS"),
    )
    rows, shorts = [], _short_names(walk.calls)
    for call in walk.calls:
        use = call.use
        taken: tuple[str, ...] = ("-",) * 8
        if use is not None:
            taken = (
                f"{use.num_blocks:,}",
                f"{use.block}",
                f"{use.resources.registers}",
                size(use.shared_bytes),
                size(use.spill_bytes),
                f"{use.occupancy.blocks}",
                f"{use.occupancy.share:.0%}",
                ", ".join(use.occupancy.limits),
            )
        moved = size(call.num_bytes), _millions(call.cost.flops)
        rows.append((shorts[call.name], call.matrix, f"{len(call.places)}", *taken, *moved))
    return format_table(header, rows) + _names_text(walk.calls)


def _time_table(step: StepTimes, ceilings: Ceilings, names: Collection[str]) -> str:
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
    """What the short names of a table stand for, where that is another name."""
    shorts, names = _short_names(calls), dict.fromkeys(call.name for call in (calls if shown is None else shown))
    return _named_lines((shorts[name], name) for name in names if shorts[name] != name)


def _whole_text(step: StepTimes) -> str:
    return (
        f"the whole step takes {step.whole.median * 1e6:,.1f} us; "
        f"its launches, each timed beside its like, add up to {step.alone_seconds * 1e6:,.1f} us"
    )


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
