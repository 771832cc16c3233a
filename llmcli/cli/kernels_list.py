"""`llmcli kernels list`: every kernel, and what those that a model launches take of a multiprocessor."""

from __future__ import annotations

from typing import Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.command import with_groups
from llmcli.cli.kernel_options import LengthOptions, SubjectOption, open_walked
from llmcli.cli.kernel_report import list_json, list_text
from llmcli.cli.options import FormatOption, MessageOptions
from llmcli.cli.progress import say_compiling
from llmcli.cli.terminal import terminal

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
    model: SubjectOption = None,
    form: FormatOption = None,
    lengths: LengthOptions = LengthOptions(),  # noqa: B008
    arch: ArchOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    messages: MessageOptions = MessageOptions(),  # noqa: B008
) -> None:
    """List the kernels and what a model's launches of them take of a multiprocessor.

    Registers, shared memory and spills are the compiler's; occupancy is computed from them. Without a card they are
    those of sm_90.

    Examples:

    llmcli kernels list

    llmcli kernels list -m Llama-2-7B --format int4 --arch sm_86
    """
    show_kernels(model, form, lengths, arch, json_)


def show_kernels(model: str | None, form: str | None, lengths: LengthOptions, arch: str | None, json_: bool) -> None:
    """Print what the command prints."""
    subject = open_walked(model, form)
    tokens = lengths.within(subject)
    if arch is None and (problem := lazy.find_problem()) is None:
        device = lazy.Device.open()
        card, arch, place = device.facts, device.arch, f"{device.name}, {device.arch}"
    else:
        if arch is None:
            terminal.info(f"compiling for {_NO_CARD_ARCH}: {problem}; choose another with --arch")
        arch = arch or _NO_CARD_ARCH
        card = lazy.card_of(arch)
        place = f"{arch}, compiled and not measured"
    walks = lazy.walk_model(subject.model, tokens, card, arch, say_compiling)
    if json_:
        terminal.write_json(list_json(subject.full_name, arch, card.num_multiprocessors, walks, lazy.KERNELS))
        return
    title = f"{subject.full_name} on {place}, {card.num_multiprocessors} multiprocessors"
    terminal.write(list_text(title, walks, lazy.KERNELS), is_drawn=True)
