"""`llmcli kernels profile`: one kernel in Nsight Compute, and the figures that matter.

Each figure comes with its meaning, and a sentence names the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmcli.cli import lazy
from llmcli.cli.bench import ReportOptions
from llmcli.cli.command import argument, option
from llmcli.cli.kernel_report import ceilings_text, use_json
from llmcli.cli.kernels_bench import CEILING_TYPES, LaunchOptions, open_card, require_kernels
from llmcli.cli.options import MessageOptions, scratch_option
from llmcli.cli.progress import say_compiling
from llmcli.cli.tables import csv_text
from llmcli.cli.targets import subject_files
from llmcli.cli.terminal import fact_lines, terminal, visible
from llmcli.cli.units import size
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.kernels.device import Device
    from llmcli.lab.nsight import Counters, Limit
    from llmcli.lab.roofline import Ceilings
    from llmcli.lab.walk import Call, Lengths
    from llmcli.measure.subject import Subject

_FIGURE, _VALUE = 26, 16  # columns
_MANY_BYTES = 1.2  # times the bytes needed, from which on the sentence mentions them
_SHOWN_STALLS, _LEAST_STALL = 3, 0.05
_STALLS = {
    "barrier": "waiting at a barrier for the other warps of the block",
    "branch_resolving": "waiting for a branch",
    "dispatch_stall": "held back by the dispatcher",
    "drain": "waiting at their end for stores to reach memory",
    "gmma": "waiting for a tensor core product of their warp group",
    "imc_miss": "waiting for a constant or an argument that is not cached",
    "lg_throttle": "waiting for the queue of loads and stores: they are too many and too small",
    "long_scoreboard": "waiting for data from L1, L2 or memory",
    "math_pipe_throttle": "waiting for an arithmetic unit that is busy",
    "membar": "waiting for a memory fence",
    "mio_throttle": "waiting for the queue of shared memory and special functions",
    "misc": "waiting for some other reason",
    "no_instruction": "waiting for instructions to be fetched",
    "not_selected": "ready, while another warp issues: there are enough of them",
    "short_scoreboard": "waiting for shared memory or special functions",
    "sleeping": "asleep, as their code asks",
    "tex_throttle": "waiting for the queue of the texture unit",
    "wait": "waiting a few fixed cycles for their previous instruction",
}

_OF_A_STUDY = "/"  # between a study and its rung


class Profiled(NamedTuple):
    """All that is known of a kernel: what it is in words and in JSON, its launch, the counters, the ceilings.

    `subject` is the model or the study; `where` says which of its launches; `facts` say the same in JSON.
    """

    name: str
    subject: str
    where: str
    facts: Mapping[str, object]
    call: Call
    device: str
    arch: str
    num_multiprocessors: int
    ceilings: Ceilings
    counters: Counters
    limit: Limit


def profile_text(one: Profiled) -> str:
    """A line for each figure, and what limits the kernel."""
    title = f"{one.subject} on {one.device}, {one.arch}, {one.num_multiprocessors} multiprocessors"
    rows = [(f"{name:<{_FIGURE}}{value:>{_VALUE}}  ", meaning) for name, value, meaning in _figures(one)]
    return (
        f"{visible(title)}\n{ceilings_text(one.ceilings)}\n\n"
        f"{one.where}\n"
        f"{one.call.name}\n"
        f"Medians of {one.counters.num_launches} launches, each alone and with empty caches\n\n"
        f"{fact_lines(rows, _FIGURE + _VALUE + 2, sys.stdout)}\n"
        f"{fact_lines([('', limit_text(one))], 0, sys.stdout)}"
    )


def profile_json(one: Profiled) -> dict[str, object]:
    """The same as an object, in seconds, bytes and shares of 1; null where this profiler counts nothing."""
    return {
        **one.facts,
        "device": one.device,
        "arch": one.arch,
        "num_multiprocessors": one.num_multiprocessors,
        "kernel": one.name,
        "name": one.call.name,
        "bytes": one.call.num_bytes,
        "operations": one.call.cost.flops,
        "use": None if one.call.use is None else use_json(one.call.use),
        "least_seconds": one.ceilings.least_seconds(one.call),
        "profiled_launches": one.counters.num_launches,
        "figures": _values(one.counters),
        "stalls": dict(one.counters.stalls),
        "limit": one.limit,
    }


def profile_csv(one: Profiled) -> str:
    """One line for each figure; an empty value where this profiler counts nothing."""
    stalls = {f"stall_{state}": share for state, share in one.counters.stalls.items()}
    figures = {**_values(one.counters), **stalls}
    whose = {"kernel": one.name, "matrix": one.call.matrix}
    rows = ({**whose, "figure": name, "value": value} for name, value in figures.items())
    return csv_text(["kernel", "matrix", "figure", "value"], rows)


def limit_text(one: Profiled) -> str:
    """The sentence that names what limits the kernel."""
    counters, use = one.counters, one.call.use
    if one.limit == "memory":
        return f"Limited by memory: it is busy at {_share(counters.memory_share)} of its peak{_extra_bytes(one)}."
    if one.limit == "L2":
        return f"Limited by the L2 cache: it is busy at {_share(counters.l2_share)} of its peak."
    if one.limit == "multiprocessors":
        share = _share(counters.compute_share)
        return f"Limited by the multiprocessors: their busiest unit works at {share} of its peak."
    if one.limit == "blocks" and use is not None:
        blocks = "1 block" if use.num_blocks == 1 else f"{use.num_blocks:,} blocks"
        return (
            f"Limited by its size: {blocks} for {one.num_multiprocessors} multiprocessors, most of which have no work."
        )
    if one.limit == "occupancy" and use is not None:
        return (
            f"Limited by occupancy: {_share(counters.occupancy)} of the warps are there on average, of "
            f"{_share(use.occupancy.share)} that could be; blocks end unevenly, or too few follow."
        )
    if one.limit == "latency" and counters.largest_stall is not None:
        state, part = counters.largest_stall
        return f"Limited by latency: nothing is busy, and warps spend {_share(part)} of their time {_STALLS[state]}."
    return "The profiler counts too little on this card to name what limits the kernel."


def _figures(one: Profiled) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each."""
    counters, call = one.counters, one.call
    moved = counters.num_bytes
    figures = [
        ("duration", "-" if counters.seconds is None else f"{counters.seconds * 1e6:,.2f} us", _duration(one)),
        (
            "memory traffic",
            "-" if moved is None else size(moved),
            f"read from memory and written to it; the kernel needs {size(call.num_bytes)}, each byte once",
        ),
        ("memory throughput", _share(counters.memory_share), "of the memory's peak; about 90% is as busy as it gets"),
        ("L2 throughput", _share(counters.l2_share), "of the L2 cache's peak; what comes from memory passes it, too"),
        ("compute throughput", _share(counters.compute_share), "of the peak of the multiprocessors' busiest unit"),
        ("L1 hit rate", _share(counters.l1_hit_share), "of what was asked of L1 was there; what is read once never is"),
        ("L2 hit rate", _share(counters.l2_hit_share), "of what was asked of L2 was there; it was empty at first"),
        ("achieved occupancy", *_occupancy(one)),
        ("issuing", _share(counters.issue_share), "of the cycles start an instruction; in the others all warps wait"),
    ]
    for state, share in list(counters.stalls.items())[:_SHOWN_STALLS]:
        if share >= _LEAST_STALL:
            name = f"stall: {state.replace('_', ' ')}"
            figures.append((name, _share(share), f"of their time, warps are {_STALLS[state]}"))
    return figures


def _duration(one: Profiled) -> str:
    least, seconds = one.ceilings.least_seconds(one.call), one.counters.seconds
    share = "" if seconds is None else f", and reaches {least / seconds:.1%} of it"
    return f"of one launch; it would take {least * 1e6:,.2f} us at the ceiling{share}"


def _occupancy(one: Profiled) -> tuple[str, str]:
    achieved, use = _share(one.counters.occupancy), one.call.use
    if use is None:
        return achieved, "warps at work, of all that a multiprocessor holds"
    allowed, limits = _share(use.occupancy.share), " and ".join(use.occupancy.limits)
    return f"{achieved} of {allowed}", f"warps at work, of all that a multiprocessor holds; {limits} allow {allowed}"


def _extra_bytes(one: Profiled) -> str:
    moved, needed = one.counters.num_bytes, one.call.num_bytes
    if moved is None or moved < _MANY_BYTES * needed:
        return ""
    return f", and it moves {moved / needed:.1f} times the bytes that it needs"


def _values(counters: Counters) -> dict[str, float | None]:
    return {
        "seconds": counters.seconds,
        "read_bytes": counters.read_bytes,
        "written_bytes": counters.written_bytes,
        "memory_throughput": counters.memory_share,
        "l2_throughput": counters.l2_share,
        "compute_throughput": counters.compute_share,
        "l1_hit_rate": counters.l1_hit_share,
        "l2_hit_rate": counters.l2_hit_share,
        "achieved_occupancy": counters.occupancy,
        "issue": counters.issue_share,
    }


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def profile_kernel(
    *,
    name: str = argument(..., "A kernel of llmcli kernels list, or STUDY/RUNG."),
    matrix: str | None = option(
        None,
        "Profile the launches that read this layer's weights, such as o_proj.",
        metavar="LAYER",
        show_default="those that move most bytes",
    ),
    launches: LaunchOptions,
    scratch: Path | None = scratch_option(),
    output: ReportOptions,
    messages: MessageOptions,
) -> None:
    """Profile one kernel with Nsight Compute, and say what its counters mean.

    It needs NVIDIA's ncu, and says how to get it. A kernel of a model runs on the model's own arrays, as in bench;
    a rung of a study at the study's last sizes.

    Examples:

    llmcli kernels profile gemv

    llmcli kernels profile gemv --matrix o_proj -m Llama-2-7B

    llmcli kernels profile rmsnorm/packed
    """
    if _OF_A_STUDY in name:
        if (matrix, scratch, launches) != (None, None, LaunchOptions()):
            raise UsageError(
                f"{name} is a rung of a study; leave out --matrix, -m, --format, --scratch and lengths, "
                "which are for models"
            )
        one = _profile_rung(name)
    else:
        _require_kernel(name)
        one = _profile_call(name, matrix, *launches.open(), scratch)
    if output.json_:
        terminal.write_json(profile_json(one))
    elif output.csv_:
        terminal.write(profile_csv(one))
    else:
        terminal.write(profile_text(one), is_drawn=True)


def _require_kernel(name: str) -> None:
    """Refuse what is not the name of a kernel. Raises: UsageError"""
    if name not in lazy.KERNELS and name.replace("-", "_") in lazy.study_names():
        study, _ = lazy.load_study(name.replace("-", "_"))
        rungs = ", ".join(f"{name}{_OF_A_STUDY}{rung.name}" for rung in study.rungs)
        raise UsageError(f"{name} is a study; choose a rung: {rungs}")
    require_kernels([name])


def _profile_call(name: str, matrix: str | None, subject: Subject, lengths: Lengths, scratch: Path | None) -> Profiled:
    """Launches of a kernel in a step of a model. Raises: LLMCliError and its subclasses"""
    device, ncu = open_card(), lazy.find_ncu()
    walks = lazy.walk_model(subject.model, lengths, device.facts, device.arch, say_compiling)
    chosen = lazy.choose_call(walks, name, matrix)
    call, title = chosen.call, chosen.walk.title
    with subject_files(subject, scratch, keep=False) as model:
        terminal.info(f"loading the model, then profiling {name} with {ncu}")
        folder = str(model.checkpoint.folder.resolve())
        request = lazy.StepRequest(folder, lengths, chosen.step, chosen.index)
        counters = lazy.profile(ncu, request, device.arch)
    on = f" on {call.matrix}" if call.matrix else ""
    where = f"{title}: {name}{on}, launches: {len(call.places)}"
    facts = {"model": subject.full_name, "step": title, "matrix": call.matrix, "launches": len(call.places)}
    return _profiled(name, subject.full_name, where, facts, call, device, counters)


def _profile_rung(name: str) -> Profiled:
    """The launch of a rung. Raises: LLMCliError and its subclasses"""
    study_name, _, rung_name = name.partition(_OF_A_STUDY)
    names = lazy.find_studies(study_name)
    if len(names) > 1:
        raise UsageError(f"{study_name} stands for several studies; choose one: {', '.join(names)}")
    study_name = names[0]
    lazy.find_rung(lazy.load_study(study_name)[0], rung_name)
    device, ncu = open_card(), lazy.find_ncu()
    study, problem, call = lazy.rung_call(study_name, rung_name, device.facts, device.arch)
    terminal.info(f"profiling {name} with {ncu}")
    counters = lazy.profile(ncu, lazy.RungRequest(study_name, rung_name), device.arch)
    where = ", ".join([f"Rung {rung_name}", *(f"{size} {number:,}" for size, number in problem.sizes.items())])
    facts = {"study": study.name, "rung": rung_name, "sizes": dict(problem.sizes)}
    return _profiled(name, f"Study {study.name}", where, facts, call, device, counters)


def _profiled(
    name: str, subject: str, where: str, facts: Mapping[str, object], call: Call, device: Device, counters: Counters
) -> Profiled:
    """The counters, with the ceilings of the card. Raises: DeviceError"""
    rates = lazy.measure_rates(device, CEILING_TYPES)
    return Profiled(
        name,
        subject,
        where,
        facts,
        call,
        device.name,
        device.arch,
        device.num_multiprocessors,
        lazy.Ceilings(rates.read_bytes, rates.flops),
        counters,
        lazy.find_limit(counters, call.use, device.num_multiprocessors),
    )
