"""`llmcli kernels`: the kernel lab; here its studies, side by side, and the list of kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from llmcli.cli import kernel_report, lazy, shared
from llmcli.cli.command import argument, command_group, option
from llmcli.cli.kernels_bench import LaunchOptions, bench_kernels, profile_kernel, roofline
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.errors import DeviceError, UsageError

arch_option = partial(
    option,
    None,
    "Compile for this architecture, such as sm_86, and measure nothing; needs no card.",
    metavar="ARCH",
    show_default=False,
)
_NO_CARD_ARCH = "sm_90"


def list_kernels(
    *,
    launches: LaunchOptions,
    arch: str | None = arch_option(),
    json_: bool = option(False, "Print a JSON object instead of tables."),
    messages: shared.MessageOptions,
) -> None:
    """List the kernels and what a model's launches of them take of a multiprocessor.

    Registers, shared memory and spills are the compiler's; occupancy is computed from them. Without a card they are
    those of sm_90.

    Examples:

    llmcli kernels list

    llmcli kernels list -m Llama-2-7B --format int4 --arch sm_86
    """
    subject, lengths = launches.open()
    problem = lazy.device.find_problem() if arch is None else None
    if arch is None and problem is None:
        device = lazy.device.Device.open()
        card, arch, place = device.facts, device.arch, f"{device.name}, {device.arch}"
    else:
        arch = arch or _NO_CARD_ARCH
        card = lazy.walk.card_of(arch)
        place = f"{arch}, compiled and not measured"
    walks = lazy.walk.walk_model(subject.model, lengths, card, arch, say_compiling)
    if problem is not None:
        terminal.info(f"compiled for {arch}: {problem}; choose another with --arch")
    if json_:
        terminal.write_json(
            kernel_report.list_json(subject.full_name, arch, card.num_multiprocessors, walks, lazy.lab_engine.KERNELS)
        )
        return
    title = f"{subject.full_name} on {place}, {card.num_multiprocessors} multiprocessors"
    terminal.write(kernel_report.list_text(title, walks, lazy.lab_engine.KERNELS), is_drawn=True)


def compare(
    *,
    study: str | None = argument(None, "A study, or the first words of several, such as decode. Without it, list all."),
    show: str | None = option(None, "Print the source of this rung.", metavar="RUNG"),
    try_: Path | None = option(None, "Add your own kernel, a file with one rung."),
    arch: str | None = arch_option(),
    json_: bool = option(False, "Print a JSON object instead of tables."),
    csv_: bool = option(False, "Print one line for each rung and choice of sizes."),
    messages: shared.MessageOptions,
) -> None:
    """Run a ladder of kernels that compute the same, from the plainest to ours.

    Every rung is compiled, compared with a float64 reference, and timed beside the others. The sentences at the end are
    computed from what was measured, and say where a lesson does not hold on this card.

    Examples:

    llmcli kernels compare rmsnorm

    llmcli kernels compare rmsnorm --show packed >mine.cu

    llmcli kernels compare rmsnorm --try mine.cu

    llmcli kernels compare rmsnorm --arch sm_86

    llmcli kernels compare decode
    """
    if study is None:
        studies = {name: lazy.study.load_study(name)[0] for name in lazy.study.study_names()}
        rows = ((name, f"{one.title} ({one.source})") for name, one in studies.items())
        terminal.write(fact_lines(rows, max(map(len, studies)) + 2, sys.stdout))
        return
    names = lazy.study.find_studies(study)
    if len(names) > 1:
        if show is not None or try_ is not None or json_ or csv_:
            raise UsageError(f"--show, --try, --json and --csv need one study; {study} stands for {', '.join(names)}")
        _compare_all(names, arch)
        return
    told, source = lazy.study.load_study(names[0])
    if show is not None:
        terminal.write(lazy.study.excerpt(lazy.study.find_rung(told, show), source))
        return
    if json_ and csv_:
        raise UsageError("--json and --csv cannot be combined")
    rungs, sources = list(told.rungs), {rung.name: source for rung in told.rungs}
    if try_ is not None:
        mine, own = lazy.study.read_rung(try_)
        if mine.name in sources:
            raise UsageError(f"{try_}: the study has a rung {mine.name!r}; give yours another name")
        rungs.append(mine)
        sources[mine.name] = own
    _compare(told, rungs, sources, arch, json_, csv_)


def _compare_all(names: list[str], arch: str | None) -> None:
    """Run one study after the other."""
    for name in names:
        study, source = lazy.study.load_study(name)
        _compare(study, list(study.rungs), {rung.name: source for rung in study.rungs}, arch, False, False)
        if name != names[-1]:
            terminal.write("\n")


def _compare(
    study: lazy.study.Study,
    rungs: list[lazy.study.Rung],
    sources: dict[str, lazy.study.Source],
    arch: str | None,
    json_: bool,
    csv_: bool,
) -> None:
    """Measure the rungs on the card, or compile them for `arch`, and report. Raises: DeviceError without a card"""
    card = ""
    findings: Sequence[lazy.compare.Finding] = ()
    if arch is not None:
        measured, place = lazy.compare.inspect_rungs(study, sources, rungs, arch), f"{arch}, compiled and not measured"
    else:
        if (problem := lazy.device.find_problem()) is not None:
            remedy = "--arch sm_86 shows registers and occupancy without a card"
            raise DeviceError(f"CUDA cannot be used: {problem}; {remedy}")
        device = lazy.device.Device.open(own_sources=lazy.study.own_sources(sources.values()))
        device.activate()
        with progress(f"measuring {study.name}", "sizes") as on_progress:
            measured = lazy.compare.compare_rungs(device, study, sources, rungs, on_progress)
        card, arch, findings = device.name, device.arch, lazy.compare.find_claims(study, measured)
        place = f"{card}, {arch}, {device.num_multiprocessors} multiprocessors"
        place += f"; every rung is right at {len(study.check_sizes)} choices of sizes"
    if json_:
        terminal.write_json(kernel_report.as_json(study, card, arch, measured, findings))
    elif csv_:
        terminal.write(kernel_report.as_csv(measured))
    else:
        _show(study, place, measured)
        if card:
            terminal.write("\n" + "".join(f"{kernel_report.finding_text(one)}\n" for one in findings), wraps=True)


def _show(study: lazy.study.Study, place: str, measured: Sequence[lazy.compare.Measured]) -> None:
    lines = (f"{study.name}: {study.title} ({study.source})", *([study.note] if study.note else []), place)
    terminal.write("".join(f"{line}\n" for line in lines) + "\n", wraps=True)
    terminal.write(kernel_report.study_text(study, measured), is_drawn=True)


kernels_app = command_group(
    "See why kernels are fast: studies, side by side, on this machine's card.",
    {
        "list": list_kernels,
        "bench": bench_kernels,
        "profile": profile_kernel,
        "roofline": roofline,
        "compare": compare,
    },
)


@kernels_app.callback(invoke_without_command=True)
def kernels(context: typer.Context) -> None:
    """See why kernels are fast: studies, side by side, on this machine's card."""
    if context.invoked_subcommand is None:
        list_kernels(launches=LaunchOptions(), arch=None, json_=False, messages=shared.MessageOptions())
