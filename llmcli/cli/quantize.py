"""`llmcli quantize`: write an int8 or int4 export of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.cli.command import with_groups
from llmcli.cli.completion import complete_device, complete_words
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.export import evaluate_export, open_export, read_evaluation_text
from llmcli.cli.export_files import DestinationArgument, FileOptions, SourceArgument, run_export
from llmcli.cli.export_report import listed, report_earlier_run, report_layers, size_table
from llmcli.cli.options import AUTO, OUTPUT_PANEL, AdapterOption, MessageOptions, parse_adapters
from llmcli.cli.terminal import terminal
from llmcli.errors import CheckpointError, UsageError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.quantization.schemes import WeightScheme

if TYPE_CHECKING:
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_plan import ExportPlan
    from llmcli.checkpoint.export_workspace import ExportWorkspace
    from llmcli.quantization.quality import TensorQuality

BITS = (8, 4)
GROUP_SIZES = {"32": 32, "64": 64, "128": 128, "channel": None}
HEAD_BITS = {"keep": None, "int8": 8}


@dataclass(frozen=True)
class FormOptions:
    """The form that the weights take."""

    bits: Annotated[
        int, typer.Option(metavar="8|4", help="Bits per weight.", autocompletion=complete_words("8", "4"))
    ] = 8
    group_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="How many weights of a row share a scale: 32, 64, 128 or channel (all).",
            autocompletion=complete_words(*GROUP_SIZES),
        ),
    ] = "128"
    asymmetric: Annotated[
        bool,
        typer.Option(
            "--asymmetric", help="Use zero points (int4 only); transformers loads it dequantized.", hidden=True
        ),
    ] = False
    head: Annotated[
        str,
        typer.Option(
            metavar="keep|int8", help="Precision of the output head.", autocompletion=complete_words(*HEAD_BITS)
        ),
    ] = "keep"
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="Keep layers whose name matches REGEX anywhere; repeatable.", hidden=True),
    ] = None

    def checked(self, shard_bytes: int) -> ExportOptions:
        """The same, checked.

        Raises: UsageError for a value that there is not.
        """
        return ExportOptions(
            scheme=_scheme(self.bits, self.group_size, self.asymmetric),
            head_bits=_choice("--head", self.head, HEAD_BITS),
            skip=tuple(self.skip or ()),
            shard_bytes=shard_bytes,
        )


@dataclass(frozen=True)
class WorkOptions:
    """Where the work is done, and how its result is measured."""

    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda or cuda:N; the files are the same.",
            metavar="DEVICE",
            autocompletion=complete_device,
        ),
    ] = AUTO
    eval_: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="FILE|builtin",
            help="Measure perplexity and divergence on a text, and write them into the export.",
        ),
    ] = None


@with_groups
def quantize(
    *,
    source: SourceArgument,
    destination: DestinationArgument,
    adapter: AdapterOption = None,
    form: FormOptions,
    work: WorkOptions,
    files: FileOptions,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the error of every layer.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    messages: MessageOptions,
) -> None:
    """Quantize a model to int8 or int4; transformers can load it too.

    Only linear layers are quantized. Run the same command again to resume a stopped run.

    Examples:

    llmcli quantize my-model my-int8

    llmcli quantize ORG/NAME my-int4 --bits 4 --dry-run
    """
    options = form.checked(files.shard_bytes())
    adapters = parse_adapters(adapter)
    runner_options = RunnerOptions(work.device, AUTO, None)
    if work.eval_ is not None:
        read_evaluation_text(work.eval_)  # before hours of work, not after
    card = None if files.dry_run else runner_options.card
    with foreign_errors_explained(f"reading {source}", CheckpointError):
        exporter = open_export(
            source, destination, options, adapters, card=card, replace=files.force, dry_run=files.dry_run
        )
    plan = exporter.plan
    if files.dry_run:
        _report_plan(plan)
        terminal.write(size_table(plan))
        return
    workspace = exporter.prepare()
    with exporter.lock:  # until the cards are written, too
        _report_plan(plan)
        report_earlier_run(workspace, len(plan.shards))
        _run(exporter, workspace, destination, verbose)
        if work.eval_ is not None:
            evaluate_export(source, adapters, destination, work.eval_, runner_options)


def _run(exporter: Exporter, workspace: ExportWorkspace, destination: Path, verbose: bool) -> None:
    def on_tensor(name: str, quality: TensorQuality) -> None:
        if verbose:
            terminal.info(
                f"{name}: error {quality.relative_rms_error:.3%}, worst row {quality.worst_row} "
                f"{quality.worst_row_error:.3%}, {quality.saturation:.2%} at the ends of the range"
            )

    qualities = run_export(exporter, workspace, f"quantizing to {destination}", on_tensor)
    worst = max(qualities, key=lambda name: qualities[name].relative_rms_error)
    total = exporter.plan.total
    terminal.info(
        f"{destination}: {decimal(total.bytes_before)} -> {decimal(total.bytes_after)} of weights, "
        f"largest error {qualities[worst].relative_rms_error:.2%} in {worst}"
    )


def _scheme(bits: int, group_size: str, is_asymmetric: bool) -> WeightScheme:
    if bits not in BITS:
        raise UsageError(f"--bits is {bits}, expected 8 or 4")
    if is_asymmetric and bits != 4:
        raise UsageError("--asymmetric is for --bits 4; int8 gains nothing from it")
    return WeightScheme(bits, _choice("--group-size", group_size, GROUP_SIZES), not is_asymmetric)


def _choice(flag: str, value: str, choices: dict[str, int | None]) -> int | None:
    if value not in choices:
        raise UsageError(f"{flag} is {value!r}, expected one of {', '.join(choices)}")
    return choices[value]


def _report_plan(plan: ExportPlan) -> None:
    """What the user should know before the work starts."""
    if plan.options is not None and plan.channel_layers:
        terminal.warn(
            f"group size {plan.options.scheme.group_size} does not divide the input size of "
            f"these layers, which get one scale per row: {listed(plan.channel_layers)}"
        )
    if plan.unties_head:
        size = decimal(plan.sizes["output head"].bytes_after)
        terminal.info(f"the output head is now stored apart from the embedding: {size} more")
    report_layers(plan)
