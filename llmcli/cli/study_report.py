"""What `llmcli kernels compare` says: times, what rungs take of a multiprocessor, what became of the claims."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.cli.tables import format_table
from llmcli.cli.units import size

if TYPE_CHECKING:
    from llmcli.lab.compare import Finding, Measured
    from llmcli.lab.study import Study
    from llmcli.lab.walk import KernelUse


_USE = ("BLOCKS", "THREADS", "REGISTERS", "SHARED", "SPILLS", "OCCUPANCY", "LIMITED BY")
_LEAST_SHOWN = 0.1  # where no rung reaches it, a rate says nothing of the study


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
    """What the rungs reach, and what their kernels take of a multiprocessor, at one choice of sizes."""
    rates = [rate for rate in (_GIGABYTES, _GIGAFLOPS) if any(rate.of(one) >= _LEAST_SHOWN for one in measured)]
    header = (
        "RUNG",
        *(rate.name for rate in rates),
        "BLOCKS",
        "THREADS",
        "REGISTERS",
        "SHARED",
        "SPILLS",
        "OCCUPANCY",
        "LIMITED BY",
    )
    rows = []
    for one in measured:
        reached = [f"{rate.of(one):,.1f}" for rate in rates]
        for number, use in enumerate(one.uses or (None,)):
            first = (one.rung, *reached) if number == 0 else ("", *("" for _ in reached))
            rows.append((*first, *(_use_cells(use) if use else ("-",) * len(_USE))))
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
    names = list(measured[0].sizes)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rung", *names, "median_seconds", "fastest_seconds", "bytes", "operations"])
    for one in measured:
        times = (one.times.median, one.times.fastest) if one.times else ("", "")
        writer.writerow([one.rung, *(one.sizes[name] for name in names), *times, one.num_bytes, one.num_operations])
    return text.getvalue()


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
    """What a launch takes of a multiprocessor."""
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


def _use_cells(use: KernelUse) -> tuple[str, ...]:
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
