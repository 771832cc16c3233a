"""`llmcli kernels bench`, `roofline` and `profile`: the kernels of a model on a card, each timed or profiled alone.

They run on the model's own arrays. Options choose the model that launches them, and the numbers of tokens. `profile`
shows one kernel in Nsight Compute: each figure comes with its meaning, and a sentence names the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmcli.cli import kernel_report, lazy, shared
from llmcli.cli.bench import ReportOptions
from llmcli.cli.command import argument, option
from llmcli.cli.completion import complete_subject
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.tables import csv_text
from llmcli.cli.targets import open_subject, refuse_scratch_of_model, subject_files
from llmcli.cli.terminal import fact_lines, terminal, visible
from llmcli.cli.units import size
from llmcli.errors import DeviceError, UsageError
from llmcli.resources import install_command

DEFAULT_SHAPE = "Llama-3.2-1B"


CEILING_TYPES = ("float32", "float16")

_PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class LengthOptions:
    """The prompt and the step of decoding whose launches are meant."""

    prompt: int | None = option(None, "Tokens of the prompt.", min=1, show_default="512")
    depth: int | None = option(None, "Tokens in the KV cache before a step of decoding.", min=1, show_default="512")
    rows: int = option(1, "Rows that decode side by side.", min=1)


@dataclass(frozen=True)
class LaunchOptions:
    """The model or shape whose launches are chosen, and the steps."""

    model: str | None = shared.model_option(
        None,
        "Whose launches: a model folder, a hub id, or a shape such as Llama-2-7B.",
        "-m",
        metavar="MODEL|SHAPE",
        show_default=DEFAULT_SHAPE,
        complete=complete_subject,
    )
    form: str | None = shared.format_option()
    lengths: LengthOptions = LengthOptions()

    def open(self) -> tuple[lazy.subject.Subject, lazy.walk.Lengths]:
        """The model or the shape, and the lengths as far as its context allows. Raises: as `open_subject`"""
        subject = open_subject(self.model or DEFAULT_SHAPE, self.form)
        maximum, lengths = subject.model.config.max_position_embeddings, self.lengths
        return subject, lazy.walk.Lengths.within(maximum, lengths.prompt, lengths.depth, lengths.rows)


def require_kernels(names: Iterable[str]) -> None:
    """Refuse what is not the name of a kernel or of the matrix library. Raises: UsageError"""
    for name in names:
        if name not in (*lazy.lab_engine.KERNELS, kernel_report.LIBRARY):
            raise UsageError(f"there is no kernel {name!r}; run llmcli kernels list to see them")


def bench_kernels(
    *,
    names: list[str] | None = argument(None, "The kernels to show; without one, all.", metavar="[NAME]..."),
    launches: LaunchOptions,
    scratch: Path | None = shared.scratch_option(),
    output: ReportOptions,
    messages: shared.MessageOptions,
) -> None:
    """Time every kernel of a model alone, on the model's own arrays.

    The ceiling is what reading the kernel's bytes takes at the speed that this card was measured to read, or its
    operations at the speed of large products, whichever is longer. What lies in L2 may be faster.

    Examples:

    llmcli kernels bench

    llmcli kernels bench gemv attention_decode -m Llama-2-7B --rows 8
    """
    chosen = names or []
    require_kernels(chosen)
    subject, lengths = launches.open()
    device, ceilings, steps = measure_subject_kernels(subject, lengths, scratch)
    launched = {stem for step in steps for stem, _ in step.walk.labels}
    for name in chosen:
        if name not in launched:
            raise UsageError(f"{subject.full_name} does not launch {name}; it launches {', '.join(sorted(launched))}")
    if output.json_:
        terminal.write_json(
            kernel_report.bench_json(subject.full_name, device.name, device.arch, steps, ceilings, chosen)
        )
    elif output.csv_:
        terminal.write(kernel_report.bench_csv(steps, ceilings, chosen))
    else:
        title = f"{subject.full_name} on {device.name}, {device.arch}, {device.num_multiprocessors} multiprocessors"
        terminal.write(kernel_report.bench_text(title, steps, ceilings, chosen), is_drawn=True)


def open_card() -> lazy.device.Device:
    """Card 0, current in this thread. Raises: DeviceError saying what works without a card"""
    problem = lazy.device.find_problem()
    if problem is not None:
        raise DeviceError(f"CUDA cannot be used: {problem}; llmcli kernels list needs no card")
    device = lazy.device.Device.open()
    device.activate()
    return device


def measure_subject_kernels(
    subject: lazy.subject.Subject, lengths: lazy.walk.Lengths, scratch: Path | None
) -> tuple[lazy.device.Device, lazy.roofline.Ceilings, Sequence[lazy.roofline.TimedStep]]:
    """The card, its ceilings, and the times of a step of decoding and of a prompt.

    Raises: DeviceError without a card; LLMCliError and its subclasses
    """
    refuse_scratch_of_model(subject, scratch)
    device = open_card()
    walks = lazy.walk.walk_model(subject.model, lengths, device.facts, device.arch, say_compiling)
    rates = lazy.rates.measure_rates(device, CEILING_TYPES)
    with subject_files(subject, scratch, keep=False) as model, progress("measuring", "kernels") as on_measure:
        steps = lazy.roofline.measure_steps(
            device,
            model,
            lengths,
            *walks,
            on_compile=say_compiling,
            on_load=lambda done, total: None,
            on_measure=on_measure,
        )
    return device, lazy.roofline.Ceilings(rates.read_bytes, rates.flops), steps


def roofline(
    *,
    shape: str | None = argument(
        None,
        "Whose kernels: a model folder, a hub id, or a shape such as Llama-2-7B.",
        metavar="MODEL|SHAPE",
        show_default=DEFAULT_SHAPE,
        complete=complete_subject,
    ),
    form: str | None = shared.format_option(),
    lengths: LengthOptions,
    scratch: Path | None = shared.scratch_option(),
    out: Path | None = option(None, "Save the plot as .png or .svg; needs matplotlib.", show_default=False),
    json_: bool = option(False, "Print a JSON object instead of tables."),
    messages: shared.MessageOptions,
) -> None:
    """Measure the card's ceilings and place every kernel of a model under them.

    The ceilings are the speed of reading and that of large products in float32, float16 and int8.

    Examples:

    llmcli kernels roofline

    llmcli kernels roofline Llama-2-7B --format int4 --out roofline.svg
    """
    if out is not None:
        _check_picture(out)
    subject, tokens = LaunchOptions(shape, form, lengths).open()
    device, ceilings, steps = measure_subject_kernels(subject, tokens, scratch)
    try:
        # The card's limit: products with codes take two int8 operations for each that is counted.
        roofs = {**ceilings.flops, "int8": lazy.rates.measure_flops(device, "int8")}
    except DeviceError as error:
        terminal.warn(f"the rate of int8 products is left out: {error}")
        roofs = dict(ceilings.flops)
    measured: lazy.roofline.Ceilings = lazy.roofline.Ceilings(ceilings.read_bytes, roofs)
    placed = [lazy.roofline.place_calls(step, measured) for step in steps]
    gaps = [lazy.roofline.find_gap(step, measured) for step in steps]
    title = f"{subject.full_name} on {device.name}"
    if json_:
        terminal.write_json(kernel_report.roofline_json(title, measured, steps, placed, gaps))
    else:
        terminal.write(kernel_report.roofline_text(title, measured, steps, placed, gaps), is_drawn=True)
    if out is not None:
        marks, labels = kernel_report.placed_marks(placed)
        lazy.roofline_figure.save_figure(out, title, marks, labels, measured.read_bytes, measured.flops)
        terminal.info(f"saved {out}")


def _check_picture(out: Path) -> None:
    """Refuse a figure that cannot be drawn, before measuring. Raises: UsageError"""
    if out.suffix.lower() not in _PICTURES:
        raise UsageError(f"--out {out} must end in {' or '.join(_PICTURES)}")
    try:
        lazy.roofline_figure.PICTURE.check(out, replace=False)
    except ModuleNotFoundError as error:
        raise UsageError(f"--out needs matplotlib: run `{install_command('llmcli[plot]')}`") from error


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
    call: lazy.walk.Call
    device: str
    arch: str
    num_multiprocessors: int
    ceilings: lazy.roofline.Ceilings
    counters: lazy.nsight.Counters
    limit: lazy.nsight.Limit


def profile_text(one: Profiled) -> str:
    """A line for each figure, and what limits the kernel."""
    title = f"{one.subject} on {one.device}, {one.arch}, {one.num_multiprocessors} multiprocessors"
    rows = [(f"{name:<{_FIGURE}}{value:>{_VALUE}}  ", meaning) for name, value, meaning in _figures(one)]
    return (
        f"{visible(title)}\n{kernel_report.ceilings_text(one.ceilings)}\n\n"
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
        "use": None if one.call.use is None else kernel_report.use_json(one.call.use),
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


def _values(counters: lazy.nsight.Counters) -> dict[str, float | None]:
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
    scratch: Path | None = shared.scratch_option(),
    output: ReportOptions,
    messages: shared.MessageOptions,
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
        if name not in lazy.lab_engine.KERNELS and name.replace("-", "_") in lazy.study.study_names():
            study, _ = lazy.study.load_study(name.replace("-", "_"))
            rungs = ", ".join(f"{name}{_OF_A_STUDY}{rung.name}" for rung in study.rungs)
            raise UsageError(f"{name} is a study; choose a rung: {rungs}")
        require_kernels([name])
        one = _profile_call(name, matrix, *launches.open(), scratch)
    if output.json_:
        terminal.write_json(profile_json(one))
    elif output.csv_:
        terminal.write(profile_csv(one))
    else:
        terminal.write(profile_text(one), is_drawn=True)


def _profile_call(
    name: str, matrix: str | None, subject: lazy.subject.Subject, lengths: lazy.walk.Lengths, scratch: Path | None
) -> Profiled:
    """Launches of a kernel in a step of a model. Raises: LLMCliError and its subclasses"""
    device, ncu = open_card(), lazy.nsight.find_ncu()
    walks = lazy.walk.walk_model(subject.model, lengths, device.facts, device.arch, say_compiling)
    chosen = lazy.profile.choose_call(walks, name, matrix)
    call, title = chosen.call, chosen.walk.title
    with subject_files(subject, scratch, keep=False) as model:
        terminal.info(f"loading the model, then profiling {name} with {ncu}")
        folder = str(model.checkpoint.folder.resolve())
        request = lazy.profile.StepRequest(folder, lengths, chosen.step, chosen.index)
        counters = lazy.profile.profile(ncu, request, device.arch)
    on = f" on {call.matrix}" if call.matrix else ""
    where = f"{title}: {name}{on}, launches: {len(call.places)}"
    facts = {"model": subject.full_name, "step": title, "matrix": call.matrix, "launches": len(call.places)}
    return _profiled(name, subject.full_name, where, facts, call, device, counters)


def _profile_rung(name: str) -> Profiled:
    """The launch of a rung. Raises: LLMCliError and its subclasses"""
    study_name, _, rung_name = name.partition(_OF_A_STUDY)
    names = lazy.study.find_studies(study_name)
    if len(names) > 1:
        raise UsageError(f"{study_name} stands for several studies; choose one: {', '.join(names)}")
    study_name = names[0]
    lazy.study.find_rung(lazy.study.load_study(study_name)[0], rung_name)
    device, ncu = open_card(), lazy.nsight.find_ncu()
    study, problem, call = lazy.profile.rung_call(study_name, rung_name, device.facts, device.arch)
    terminal.info(f"profiling {name} with {ncu}")
    counters = lazy.profile.profile(ncu, lazy.profile.RungRequest(study_name, rung_name), device.arch)
    where = ", ".join([f"Rung {rung_name}", *(f"{size} {number:,}" for size, number in problem.sizes.items())])
    facts = {"study": study.name, "rung": rung_name, "sizes": dict(problem.sizes)}
    return _profiled(name, f"Study {study.name}", where, facts, call, device, counters)


def _profiled(
    name: str,
    subject: str,
    where: str,
    facts: Mapping[str, object],
    call: lazy.walk.Call,
    device: lazy.device.Device,
    counters: lazy.nsight.Counters,
) -> Profiled:
    """The counters, with the ceilings of the card. Raises: DeviceError"""
    rates = lazy.rates.measure_rates(device, CEILING_TYPES)
    return Profiled(
        name,
        subject,
        where,
        facts,
        call,
        device.name,
        device.arch,
        device.num_multiprocessors,
        lazy.roofline.Ceilings(rates.read_bytes, rates.flops),
        counters,
        lazy.nsight.find_limit(counters, call.use, device.num_multiprocessors),
    )
