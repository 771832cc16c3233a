"""What `llmcli kernels compare` says: times, what rungs take of a multiprocessor, what became of the claims."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmcli.cli.tables import format_table
from llmcli.cli.units import size

if TYPE_CHECKING:
    from llmcli.lab.compare import Finding, Measured
    from llmcli.lab.kernel_use import KernelUse
    from llmcli.lab.study_file import Study


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
    is_measured = measured[0].times is not None
    rates = ("GB/s", "GFLOP/s") if is_measured else ()
    header = ("RUNG", *rates, "BLOCKS", "THREADS", "REGISTERS", "SHARED", "SPILLS", "OCCUPANCY", "LIMITED BY")
    rows = []
    for one in measured:
        reached = _rates(one) if is_measured else ()
        for number, use in enumerate(one.uses or (None,)):
            first = (one.rung, *reached) if number == 0 else ("", *("" for _ in reached))
            rows.append((*first, *(_use_cells(use) if use else ("-",) * 7)))
    sizes = ", ".join(f"{name} {number:,}" for name, number in measured[0].sizes.items())
    return f"At {sizes}\n{format_table(header, rows)}"


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


def _rates(one: Measured) -> tuple[str, str]:
    seconds = one.times.median if one.times else float("inf")
    return f"{one.num_bytes / seconds / 1e9:,.1f}", f"{one.num_operations / seconds / 1e9:,.1f}"


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
