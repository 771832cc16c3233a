"""`llmcli kernels roofline`: how near each kernel of a model comes to what the card could do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.command import with_groups
from llmcli.cli.completion import complete_subject
from llmcli.cli.kernel_options import DEFAULT_SHAPE, LengthOptions, open_walked
from llmcli.cli.kernels_bench import ScratchOption, measure_subject_kernels
from llmcli.cli.options import FormatOption, MessageOptions
from llmcli.cli.roofline_report import placed_marks, roofline_json, roofline_text
from llmcli.cli.terminal import terminal
from llmcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from llmcli.lab.roofline import Ceilings

_PICTURES = (".png", ".svg")


@with_groups
def roofline(
    *,
    shape: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|SHAPE",
            help="Whose kernels: a model folder, a hub id, or a shape such as Llama-2-7B.",
            show_default=DEFAULT_SHAPE,
            autocompletion=complete_subject,
        ),
    ] = None,
    form: FormatOption = None,
    lengths: LengthOptions = LengthOptions(),  # noqa: B008
    scratch: ScratchOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="FILE", help="Save the plot as .png or .svg; needs matplotlib.", show_default=False
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    messages: MessageOptions = MessageOptions(),  # noqa: B008
) -> None:
    """Measure the card's ceilings and place every kernel of a model under them.

    The ceilings are the speed of reading and that of large products in float32, float16 and int8.

    Examples:

    llmcli kernels roofline

    llmcli kernels roofline Llama-2-7B --format int4 --out roofline.svg
    """
    if out is not None:
        _check_picture(out)
    subject = open_walked(shape, form)
    device, ceilings, steps = measure_subject_kernels(subject, lengths.within(subject), scratch)
    try:
        # What the card could do: products with codes take two int8 operations for each that is counted.
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
    """Refuse what could not be drawn, before anything is measured.

    Raises: UsageError
    """
    if out.suffix.lower() not in _PICTURES:
        raise UsageError(f"--out {out} must end in {' or '.join(_PICTURES)}")
    try:
        lazy.PICTURE.check(out, replace=False)
    except ModuleNotFoundError as error:
        raise UsageError('--out needs matplotlib, which is not installed; pip install "llmcli[plot]"') from error
