"""`llmcli kernels profile`: one kernel in Nsight Compute, and the few figures that matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.bench import ReportOptions
from llmcli.cli.command import with_groups
from llmcli.cli.kernel_options import LengthOptions, SubjectOption, open_walked, require_kernels
from llmcli.cli.kernels_bench import CEILING_TYPES, ScratchOption, open_card
from llmcli.cli.options import FormatOption, MessageOptions
from llmcli.cli.profile_report import Profiled, profile_csv, profile_json, profile_text
from llmcli.cli.progress import say_compiling
from llmcli.cli.targets import subject_files
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.kernels.device import Device
    from llmcli.lab.counters import Counters
    from llmcli.lab.walk import Call, Lengths
    from llmcli.measure.subject import Subject

_OF_A_STUDY = "/"  # between a study and its rung


@with_groups
def profile_kernel(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kernel of llmcli kernels list, or STUDY/RUNG.")],
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER",
            help="Profile the launches that read this layer's weights, such as o_proj.",
            show_default="those that move most bytes",
        ),
    ] = None,
    model: SubjectOption = None,
    form: FormatOption = None,
    lengths: LengthOptions = LengthOptions(),  # noqa: B008
    scratch: ScratchOption = None,
    output: ReportOptions = ReportOptions(),  # noqa: B008
    messages: MessageOptions = MessageOptions(),  # noqa: B008
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
        if (matrix, model, form, scratch, lengths) != (None, None, None, None, LengthOptions()):
            raise UsageError(
                f"{name} is a rung of a study; leave out --matrix, -m, --format, --scratch and lengths, "
                "which are for models"
            )
        one = _profile_rung(name)
    else:
        _require_kernel(name)
        subject = open_walked(model, form)
        one = _profile_call(name, matrix, subject, lengths.within(subject), scratch)
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
    """Launches of a kernel in a step of a model.

    Raises: LLMCliError and its subclasses
    """
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
    """The launch of a rung.

    Raises: LLMCliError and its subclasses
    """
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
    name: str,
    subject: str,
    where: str,
    facts: Mapping[str, object],
    call: Call,
    device: Device,
    counters: Counters,
) -> Profiled:
    """What was counted, beside the ceilings of the card.

    Raises: DeviceError
    """
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
