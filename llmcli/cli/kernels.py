"""`llmcli kernels`: the kernel lab; here its studies, side by side, and the list of kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.command import Command, Group, with_groups
from llmcli.cli.kernel_report import as_csv, as_json, finding_text, list_json, list_text, study_text
from llmcli.cli.kernels_bench import LaunchOptions, bench_kernels, roofline
from llmcli.cli.kernels_profile import profile_kernel
from llmcli.cli.options import DebugOption, MessageOptions, QuietOption
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from llmcli.lab.compare import Measured
    from llmcli.lab.study import Rung, Source, Study

ArchOption = Annotated[
    str | None,
    typer.Option(
        metavar="ARCH",
        help="Compile for this architecture, such as sm_86, and measure nothing; needs no card.",
        show_default=False,
    ),
]
_NO_CARD_ARCH = "sm_90"


@with_groups
def list_kernels(
    *,
    launches: LaunchOptions,
    arch: ArchOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    messages: MessageOptions,
) -> None:
    """List the kernels and what a model's launches of them take of a multiprocessor.

    Registers, shared memory and spills are the compiler's; occupancy is computed from them. Without a card they are
    those of sm_90.

    Examples:

    llmcli kernels list

    llmcli kernels list -m Llama-2-7B --format int4 --arch sm_86
    """
    show_kernels(launches, arch, json_)


def show_kernels(launches: LaunchOptions, arch: str | None, json_: bool) -> None:
    """Print the list."""
    subject, lengths = launches.open()
    if arch is None and (problem := lazy.find_problem()) is None:
        device = lazy.Device.open()
        card, arch, place = device.facts, device.arch, f"{device.name}, {device.arch}"
    else:
        if arch is None:
            terminal.info(f"compiling for {_NO_CARD_ARCH}: {problem}; choose another with --arch")
        arch = arch or _NO_CARD_ARCH
        card = lazy.card_of(arch)
        place = f"{arch}, compiled and not measured"
    walks = lazy.walk_model(subject.model, lengths, card, arch, say_compiling)
    if json_:
        terminal.write_json(list_json(subject.full_name, arch, card.num_multiprocessors, walks, lazy.KERNELS))
        return
    title = f"{subject.full_name} on {place}, {card.num_multiprocessors} multiprocessors"
    terminal.write(list_text(title, walks, lazy.KERNELS), is_drawn=True)


kernels_app = typer.Typer(cls=Group, help="See why kernels are fast: studies, side by side, on this machine's card.")

_COMMANDS = (
    kernels_app.command("list", cls=Command)(list_kernels),
    kernels_app.command("bench", cls=Command)(bench_kernels),
    kernels_app.command("profile", cls=Command)(profile_kernel),
    kernels_app.command("roofline", cls=Command)(roofline),
)


@kernels_app.callback(invoke_without_command=True)
def kernels(context: typer.Context) -> None:
    """See why kernels are fast: studies, side by side, on this machine's card."""
    if context.invoked_subcommand is None:
        show_kernels(LaunchOptions(), None, False)


@kernels_app.command("compare", cls=Command)
def compare(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY", help="A study, or the first words of several, such as decode. Without it, list all."
        ),
    ] = None,
    show: Annotated[str | None, typer.Option(metavar="RUNG", help="Print the source of this rung.")] = None,
    try_: Annotated[
        Path | None,
        typer.Option("--try", readable=False, metavar="FILE", help="Add your own kernel, a file with one rung."),
    ] = None,
    arch: ArchOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="Print one line for each rung and choice of sizes.")] = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
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
        _list_studies()
        return
    names = lazy.find_studies(study)
    if len(names) > 1:
        if show is not None or try_ is not None or json_ or csv_:
            raise UsageError(f"--show, --try, --json and --csv need one study; {study} stands for {', '.join(names)}")
        _compare_all(names, arch)
        return
    told, source = lazy.load_study(names[0])
    if show is not None:
        terminal.write(lazy.excerpt(lazy.find_rung(told, show), source))
        return
    if json_ and csv_:
        raise UsageError("--json and --csv cannot be combined")
    rungs, sources = list(told.rungs), {rung.name: source for rung in told.rungs}
    if try_ is not None:
        mine, own = lazy.read_rung(try_)
        if mine.name in sources:
            raise UsageError(f"{try_}: the study has a rung {mine.name!r}; give yours another name")
        rungs.append(mine)
        sources[mine.name] = own
    _compare(told, rungs, sources, arch, json_, csv_)


def _list_studies() -> None:
    studies = {name: lazy.load_study(name)[0] for name in lazy.study_names()}
    rows = ((name, f"{study.title} ({study.source})") for name, study in studies.items())
    terminal.write(fact_lines(rows, max(map(len, studies)) + 2, sys.stdout))


def _compare_all(names: list[str], arch: str | None) -> None:
    """Run one study after the other."""
    for name in names:
        study, source = lazy.load_study(name)
        _compare(study, list(study.rungs), {rung.name: source for rung in study.rungs}, arch, False, False)
        if name != names[-1]:
            terminal.write("\n")


def _compare(
    study: Study, rungs: list[Rung], sources: dict[str, Source], arch: str | None, json_: bool, csv_: bool
) -> None:
    if arch is None:
        _measure(study, rungs, sources, json_, csv_)
    else:
        _inspect(study, rungs, sources, arch, json_, csv_)


def _measure(study: Study, rungs: list[Rung], sources: dict[str, Source], json_: bool, csv_: bool) -> None:
    problem = lazy.find_problem()
    if problem is not None:
        raise DeviceError(f"CUDA cannot be used: {problem}; --arch sm_86 shows registers and occupancy without a card")
    device = lazy.Device.open(own_sources=lazy.own_sources(sources.values()))
    device.activate()
    with progress(f"measuring {study.name}", "sizes") as on_progress:
        measured = lazy.compare_rungs(device, study, sources, rungs, on_progress)
    findings = lazy.find_claims(study, measured)
    if json_:
        terminal.write_json(as_json(study, device.name, device.arch, measured, findings))
    elif csv_:
        terminal.write(as_csv(measured))
    else:
        count = len(study.check_sizes)
        place = f"{device.name}, {device.arch}, {device.num_multiprocessors} multiprocessors"
        _show(study, f"{place}; every rung is right at {count} choices of sizes", measured)
        terminal.write("\n" + "".join(f"{finding_text(one)}\n" for one in findings), wraps=True)


def _inspect(study: Study, rungs: list[Rung], sources: dict[str, Source], arch: str, json_: bool, csv_: bool) -> None:
    measured = lazy.inspect_rungs(study, sources, rungs, arch)
    if json_:
        terminal.write_json(as_json(study, "", arch, measured, ()))
    elif csv_:
        terminal.write(as_csv(measured))
    else:
        _show(study, f"{arch}, compiled and not measured", measured)


def _show(study: Study, place: str, measured: Sequence[Measured]) -> None:
    lines = (f"{study.name}: {study.title} ({study.source})", *([study.note] if study.note else []), place)
    terminal.write("".join(f"{line}\n" for line in lines) + "\n", wraps=True)
    terminal.write(study_text(study, measured), is_drawn=True)
