"""`llmcli kernels bench` and `roofline`: every kernel of a model timed alone, and how near it comes to the card's best.

The kernels run on the model's own arrays. Options choose the model that launches them, and the numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.bench import ReportOptions
from llmcli.cli.command import argument, option
from llmcli.cli.completion import complete_subject
from llmcli.cli.kernel_report import LIBRARY, bench_csv, bench_json, bench_text
from llmcli.cli.options import MessageOptions, format_option, model_option, scratch_option
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.roofline_report import placed_marks, roofline_json, roofline_text
from llmcli.cli.targets import open_subject, refuse_scratch_of_model, subject_files
from llmcli.cli.terminal import terminal
from llmcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from llmcli.kernels.device import Device
    from llmcli.lab.roofline import Ceilings, TimedStep
    from llmcli.lab.walk import Lengths
    from llmcli.measure.subject import Subject

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

    model: str | None = model_option(
        None,
        "Whose launches: a model folder, a hub id, or a shape such as Llama-2-7B.",
        "-m",
        metavar="MODEL|SHAPE",
        show_default=DEFAULT_SHAPE,
        complete=complete_subject,
    )
    form: str | None = format_option()
    lengths: LengthOptions = LengthOptions()

    def open(self) -> tuple[Subject, Lengths]:
        """The model or the shape, and the lengths as far as its context allows. Raises: as `open_subject`"""
        subject = open_subject(self.model or DEFAULT_SHAPE, self.form)
        maximum, lengths = subject.model.config.max_position_embeddings, self.lengths
        return subject, lazy.Lengths.within(maximum, lengths.prompt, lengths.depth, lengths.rows)


def require_kernels(names: Iterable[str]) -> None:
    """Refuse what is not the name of a kernel or of the matrix library. Raises: UsageError"""
    for name in names:
        if name not in (*lazy.KERNELS, LIBRARY):
            raise UsageError(f"there is no kernel {name!r}; run llmcli kernels list to see them")


def bench_kernels(
    *,
    names: list[str] | None = argument(None, "The kernels to show; without one, all.", metavar="[NAME]..."),
    launches: LaunchOptions,
    scratch: Path | None = scratch_option(),
    output: ReportOptions,
    messages: MessageOptions,
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
        terminal.write_json(bench_json(subject.full_name, device.name, device.arch, steps, ceilings, chosen))
    elif output.csv_:
        terminal.write(bench_csv(steps, ceilings, chosen))
    else:
        title = f"{subject.full_name} on {device.name}, {device.arch}, {device.num_multiprocessors} multiprocessors"
        terminal.write(bench_text(title, steps, ceilings, chosen), is_drawn=True)


def open_card() -> Device:
    """Card 0, current in this thread. Raises: DeviceError saying what works without a card"""
    problem = lazy.find_problem()
    if problem is not None:
        raise DeviceError(f"CUDA cannot be used: {problem}; llmcli kernels list needs no card")
    device = lazy.Device.open()
    device.activate()
    return device


def measure_subject_kernels(
    subject: Subject, lengths: Lengths, scratch: Path | None
) -> tuple[Device, Ceilings, Sequence[TimedStep]]:
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


def roofline(
    *,
    shape: str | None = argument(
        None,
        "Whose kernels: a model folder, a hub id, or a shape such as Llama-2-7B.",
        metavar="MODEL|SHAPE",
        show_default=DEFAULT_SHAPE,
        complete=complete_subject,
    ),
    form: str | None = format_option(),
    lengths: LengthOptions,
    scratch: Path | None = scratch_option(),
    out: Path | None = option(None, "Save the plot as .png or .svg; needs matplotlib.", show_default=False),
    json_: bool = option(False, "Print a JSON object instead of tables."),
    messages: MessageOptions,
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
        roofs = {**ceilings.flops, "int8": lazy.measure_flops(device, "int8")}
    except DeviceError as error:
        terminal.warn(f"the rate of int8 products is left out: {error}")
        roofs = dict(ceilings.flops)
    measured: Ceilings = lazy.Ceilings(ceilings.read_bytes, roofs)
    placed = [lazy.place_calls(step, measured) for step in steps]
    gaps = [lazy.find_gap(step, measured) for step in steps]
    title = f"{subject.full_name} on {device.name}"
    if json_:
        terminal.write_json(roofline_json(title, measured, steps, placed, gaps))
    else:
        terminal.write(roofline_text(title, measured, steps, placed, gaps), is_drawn=True)
    if out is not None:
        marks, labels = placed_marks(placed)
        lazy.save_figure(out, title, marks, labels, measured.read_bytes, measured.flops)
        terminal.info(f"saved {out}")


def _check_picture(out: Path) -> None:
    """Refuse a figure that cannot be drawn, before measuring. Raises: UsageError"""
    if out.suffix.lower() not in _PICTURES:
        raise UsageError(f"--out {out} must end in {' or '.join(_PICTURES)}")
    try:
        lazy.PICTURE.check(out, replace=False)
    except ModuleNotFoundError as error:
        raise UsageError('--out needs matplotlib, which is not installed; pip install "llmcli[plot]"') from error
