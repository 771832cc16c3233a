"""`llmcli kernels bench`: every kernel of a model timed alone, on the model's own arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.bench import ReportOptions
from llmcli.cli.command import with_groups
from llmcli.cli.kernel_options import LengthOptions, SubjectOption, open_walked, require_kernels
from llmcli.cli.kernel_report import bench_csv, bench_json, bench_text
from llmcli.cli.options import FormatOption, MessageOptions
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.targets import refuse_scratch_of_model, subject_files
from llmcli.cli.terminal import terminal
from llmcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from llmcli.kernels.device import Device
    from llmcli.lab.roofline import Ceilings
    from llmcli.lab.step_times import StepTimes
    from llmcli.lab.walk import Lengths
    from llmcli.measure.subject import Subject

CEILING_TYPES = ("float32", "float16")

ScratchOption = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FOLDER",
        help="Where to write a SHAPE's random weights.",
        show_default="the user's cache",
        hidden=True,
    ),
]


@with_groups
def bench_kernels(
    *,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="The kernels to show; without one, all.")
    ] = None,
    model: SubjectOption = None,
    form: FormatOption = None,
    lengths: LengthOptions = LengthOptions(),  # noqa: B008
    scratch: ScratchOption = None,
    output: ReportOptions = ReportOptions(),  # noqa: B008
    messages: MessageOptions = MessageOptions(),  # noqa: B008
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
    subject = open_walked(model, form)
    tokens = lengths.within(subject)
    device, ceilings, steps = measure_subject_kernels(subject, tokens, scratch)
    launched = {stem for step in steps for stem, _ in step.walk.labels}
    for name in chosen:
        if name not in launched:
            raise UsageError(f"{subject.full_name} does not launch {name}; it launches {', '.join(sorted(launched))}")
    if output.json_:
        terminal.write_json(bench_json(subject.full_name, device.name, device.arch, steps, ceilings, chosen))
    elif output.csv_:
        terminal.write(bench_csv(steps, ceilings, chosen))
    else:
        title = f"{subject.full_name} on {device.name}, {device.arch}, {device.num_multiprocessors} multiprocessors"
        terminal.write(bench_text(title, steps, ceilings, chosen), is_drawn=True)


def open_card() -> Device:
    """Card 0, current in this thread.

    Raises: DeviceError saying what can be had without a card
    """
    problem = lazy.find_problem()
    if problem is not None:
        raise DeviceError(f"CUDA cannot be used: {problem}; llmcli kernels list needs no card")
    device = lazy.Device.open()
    device.activate()
    return device


def measure_subject_kernels(
    subject: Subject, lengths: Lengths, scratch: Path | None
) -> tuple[Device, Ceilings, Sequence[StepTimes]]:
    """The card, its ceilings, and the times of a step of decoding and of a prompt.

    Raises: DeviceError without a card; LLMCliError and its subclasses
    """
    refuse_scratch_of_model(subject, scratch)
    device = open_card()
    walks = lazy.walk_model(subject.model, lengths, device.facts, device.arch, say_compiling)
    rates = lazy.measure_rates(device, CEILING_TYPES)
    with subject_files(subject, scratch, keep=False) as model, progress("measuring", "kernels") as on_measure:
        steps = lazy.measure_steps(
            device,
            model,
            lengths,
            *walks,
            on_compile=say_compiling,
            on_load=lambda done, total: None,
            on_measure=on_measure,
        )
    return device, lazy.Ceilings(rates.read_bytes, rates.flops), steps
