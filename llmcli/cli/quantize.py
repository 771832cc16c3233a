"""`llmcli quantize` and `convert`: write an int8 or int4 export of a model, or a quantized one as compressed-tensors.

`convert` copies the codes. Both share source and destination, reports on sizes, layers and earlier runs, and
the measurement on a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from rich.filesize import decimal

from llmcli.checkpoint.hub_library import is_gguf
from llmcli.cli import lazy, shared
from llmcli.cli.command import argument, option
from llmcli.cli.completion import complete_device, complete_model
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.evaluate import DEFAULT_WINDOW, describe_change, evaluate_models
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.prompt import chosen_word, read_text
from llmcli.cli.session import model_folder, open_session, shown_name
from llmcli.cli.terminal import terminal
from llmcli.cli.units import divergence, first_of
from llmcli.errors import EXIT_INTERRUPTED, CheckpointError, UsageError, foreign_errors_explained
from llmcli.quantization.schemes import DEFAULT_SHARD_BYTES, ExportOptions, WeightScheme
from llmcli.resources import resource_folder, temporary_folder

_UNIT_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_MAX_LISTED = 8  # layers named in one line; the model card has them all

BUILTIN_TEXT = "builtin"

BITS = (8, 4)
GROUP_SIZES = {"32": 32, "64": 64, "128": 128, "channel": None}
HEAD_BITS = {"keep": None, "int8": 8}


def report_layers(plan: lazy.export_plan.ExportPlan) -> None:
    """Say which layers stay as they are, which tensors are left out, and which programs may not accept the result."""
    if plan.skipped:
        terminal.info(f"kept as they are: {first_of(plan.skipped, _MAX_LISTED)}")
    if plan.model.tensors.unused:
        terminal.info(f"left out, not used by the model: {first_of(plan.model.tensors.unused, _MAX_LISTED)}")
    for concern in plan.concerns:
        terminal.warn(concern)


@dataclass(frozen=True)
class FileOptions:
    """What to read and to write, whether to replace it, and the size of files."""

    source: str = argument(..., "Model folder, or hub id such as ORG/NAME.", metavar="SRC", complete=complete_model)
    destination: Path = argument(..., "Folder to write; it must not exist.", metavar="DST")
    shard_size: str = option(
        f"{DEFAULT_SHARD_BYTES // 10**9}GB", "Largest weight file, such as 5GB or 500MB.", metavar="SIZE", hidden=True
    )
    dry_run: bool = option(False, "Show sizes before and after; write nothing.")
    force: bool = option(False, "Replace DST if it is a model folder.")

    def shard_bytes(self) -> int:
        """The size of the largest file. Raises: UsageError for an invalid size."""
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*(MB|GB|MiB|GiB)", self.shard_size)
        num_bytes = int(float(match[1]) * _UNIT_BYTES[match[2]]) if match else 0
        if num_bytes < 1:
            raise UsageError(f"--shard-size is {self.shard_size!r}, expected a size such as 5GB or 500MB")
        return num_bytes


def run_export(
    exporter: lazy.export.Exporter,
    workspace: lazy.export_workspace.ExportWorkspace,
    doing: str,
    on_tensor: Callable[[str, lazy.rounding.TensorQuality], None],
) -> dict[str, lazy.rounding.TensorQuality]:
    """Write the export under a progress bar named `doing`; Ctrl-C ends the command and says how to resume."""
    try:
        with progress(doing) as on_progress:
            return exporter.run(workspace, on_progress, on_tensor)
    except KeyboardInterrupt:
        terminal.info(f"Stopped: run the same command again to resume; finished files are in {workspace.folder}")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _open_source(files: FileOptions) -> tuple[lazy.model.Model, lazy.folder.SourceState, str, Path]:
    """The source with the state of its files, its name in the cards, and the resolved destination.

    Raises: UsageError and CheckpointError, with their subclasses.
    """
    destination = _checked_destination(files)  # before anything is downloaded
    folder = model_folder(files.source)
    state = lazy.folder.SourceState.record(folder)
    model = lazy.model.open_model(folder)
    name = shown_name(files.source, folder)
    lazy.export_workspace.require_text(name, "the name of the source")
    return model, state, name, destination


def _checked_destination(files: FileOptions) -> Path:
    """The resolved destination. Raises: UsageError if it cannot be used"""
    destination = lazy.export_workspace.resolve_destination(files.destination)
    if not files.dry_run:
        lazy.export_workspace.refuse_existing(destination, replace=files.force)
    return destination


def _open_card_quantizer(card: int, weights: Sequence[lazy.export_plan.PlannedWeight]) -> lazy.quantizer.CardQuantizer:
    device = lazy.device.Device.open(card)
    terminal.info(f"quantizing on {device.name} (cuda:{device.index})")
    return lazy.quantizer.CardQuantizer(device, weights, on_compile=say_compiling)


def evaluate_export(
    source: str, adapters: Sequence[shared.AdapterChoice], destination: Path, text: str, options: RunnerOptions
) -> None:
    """Measure the effect of quantizing on a text: `builtin`, or a file. The figures go into the export's cards.

    Raises: UsageError for a text that cannot be read.
    """
    content, name = read_evaluation_text(text)
    sessions = [shared.with_adapters(open_session(source), adapters), open_session(str(destination))]
    window = sessions[0].resolve_context(None, DEFAULT_WINDOW)
    (before, after), comparison = evaluate_models(sessions, options, content, window=window, stride=window // 2)
    assert comparison is not None
    lazy.export_workspace.add_evaluation(
        destination,
        {
            "text": name,
            "num_tokens": before.num_tokens,
            "window": before.window,
            "stride": before.stride,
            "perplexity_before": before.perplexity,
            "perplexity_after": after.perplexity,
            "perplexity_change_interval": comparison.perplexity_change_interval,
            "mean_kl": comparison.mean_kl,
            "top1_agreement": comparison.top1_agreement,
        },
    )
    terminal.info(
        f"perplexity {before.perplexity:.4f} -> {after.perplexity:.4f}: {describe_change(comparison)}; "
        f"mean KL {divergence(comparison.mean_kl)} nats, top-1 agreement {comparison.top1_agreement:.2%}, on {name}"
    )


def read_evaluation_text(choice: str) -> tuple[str, str]:
    """The text of `--eval` and its name: the built-in one, or a file.

    Raises: UsageError for a file that cannot be read.
    """
    if choice == BUILTIN_TEXT:
        path = resource_folder("configs") / "texts" / "stories.txt"
        return path.read_text(encoding="utf-8"), "the built-in stories"
    return read_text(Path(choice), "--eval"), Path(choice).name


def convert(
    *,
    files: FileOptions,
    dequantize: bool = option(False, "GGUF: write floats of 16 bits in place of codes."),
    messages: shared.MessageOptions,
) -> None:
    """Write a GGUF file, or an AWQ, GPTQ or w8a8 model, as a folder of compressed-tensors.

    Codes, scales and zero points stay the same; nothing is quantized again, but GGUF's K-quants and types of 5 bits,
    which become int8. Run the same command again to resume.

    Examples:

    llmcli convert my-awq my-int4

    llmcli convert model-Q4_K_M.gguf my-model

    llmcli convert ORG/NAME-GPTQ my-int4 --dry-run
    """
    open_reader: Callable[[], lazy.reader.TensorReader]
    source, destination = Path(files.source), files.destination
    if dequantize and not is_gguf(files.source):
        raise UsageError(f"--dequantize is for GGUF files, not for {source}")
    with ExitStack() as stack, foreign_errors_explained(f"reading {source}", CheckpointError):
        if is_gguf(files.source):
            folder = _checked_destination(files)
            small_files = Path(stack.enter_context(temporary_folder("gguf")))
            plan = lazy.gguf_model.plan_gguf(source, small_files, files.shard_bytes(), has_codes=not dequantize)
            open_reader, name = lazy.gguf_model.GgufReader, source.name
        else:
            model, state, name, folder = _open_source(files)
            plan, open_reader = (
                lazy.export_plan.plan_conversion(model, state, files.shard_bytes()),
                lazy.reader.TensorReader,
            )
        exporter = lazy.export.Exporter(plan, folder, name, replace=files.force, open_reader=open_reader)

        def run(workspace: lazy.export_workspace.ExportWorkspace) -> None:
            qualities = run_export(exporter, workspace, f"converting to {destination}", lambda name, quality: None)
            total = exporter.plan.total
            error = f", {_largest_error(qualities)}" if qualities else ""
            before, after = decimal(total.bytes_before), decimal(total.bytes_after)
            terminal.info(f"{destination}: {before} -> {after} of weights{error}")

        _show_and_run(exporter, files, report_layers, run)


@dataclass(frozen=True)
class FormOptions:
    """The format of the weights."""

    bits: int = option(8, "Bits per weight.", metavar="8|4", words=("8", "4"))
    group_size: str = option(
        "128",
        "How many weights of a row share a scale: 32, 64, 128 or channel (all).",
        metavar="SIZE",
        words=GROUP_SIZES,
    )
    asymmetric: bool = option(False, "Use zero points (int4 only); transformers loads it dequantized.", hidden=True)
    head: str = option("keep", "Precision of the output head.", metavar="keep|int8", words=HEAD_BITS)
    skip: list[str] | None = option(
        None, "Keep layers whose name matches REGEX anywhere; repeatable.", metavar="REGEX", hidden=True
    )

    def checked(self, shard_bytes: int) -> ExportOptions:
        """The checked options. Raises: UsageError for an unknown value"""
        return ExportOptions(
            scheme=_scheme(self.bits, self.group_size, self.asymmetric),
            head_bits=HEAD_BITS[chosen_word("--head", self.head, HEAD_BITS)],
            skip=tuple(self.skip or ()),
            shard_bytes=shard_bytes,
        )


@dataclass(frozen=True)
class WorkOptions:
    """The device of the work, and the text that measures its result."""

    device: str = option(shared.AUTO, "auto, cpu, cuda or cuda:N; the files are the same.", complete=complete_device)
    eval_: str | None = option(
        None, "Measure perplexity and divergence on a text, and write them into the export.", metavar="FILE|builtin"
    )


def quantize(
    *,
    adapter: list[str] | None = shared.adapter_option(),
    form: FormOptions,
    work: WorkOptions,
    files: FileOptions,
    verbose: bool = shared.output_option(False, "Print the error of every layer.", "-v"),
    messages: shared.MessageOptions,
) -> None:
    """Quantize a model to int8 or int4; transformers can load it too.

    Only linear layers are quantized. Run the same command again to resume a stopped run.

    Examples:

    llmcli quantize my-model my-int8

    llmcli quantize ORG/NAME my-int4 --bits 4 --dry-run
    """
    source, destination, options = files.source, files.destination, form.checked(files.shard_bytes())
    adapters = shared.parse_adapters(adapter)
    runner_options = RunnerOptions(work.device, shared.AUTO, None)
    if work.eval_ is not None:
        read_evaluation_text(work.eval_)  # before hours of work, not after
    card = None if files.dry_run else runner_options.card
    with foreign_errors_explained(f"reading {source}", CheckpointError):
        model, state, name, folder = _open_source(files)
        plan = lazy.export_plan.plan_export(shared.add_adapters(model, adapters), options, state)
        if card is None:
            exporter = lazy.export.Exporter(plan, folder, name, replace=files.force)
        else:
            open_quantizer = partial(_open_card_quantizer, card, plan.weights)
            exporter = lazy.export.Exporter(plan, folder, name, replace=files.force, open_quantizer=open_quantizer)

    def run(workspace: lazy.export_workspace.ExportWorkspace) -> None:
        _run(exporter, workspace, destination, verbose)
        if work.eval_ is not None:
            evaluate_export(source, adapters, destination, work.eval_, runner_options)

    _show_and_run(exporter, files, _report_plan, run)


def _show_and_run(
    exporter: lazy.export.Exporter,
    files: FileOptions,
    report: Callable[[lazy.export_plan.ExportPlan], None],
    run: Callable[[lazy.export_workspace.ExportWorkspace], None],
) -> None:
    """Report the plan of an export and run it, with its folder locked; with --dry-run show its sizes instead."""
    plan = exporter.plan
    if files.dry_run:
        report(plan)
        terminal.write(f"{'kind':<18}{'tensors':>8}{'before':>12}{'after':>12}\n")
        for kind, sizes in {**plan.sizes, "all": plan.total}.items():
            before, after = decimal(sizes.bytes_before), decimal(sizes.bytes_after)
            terminal.write(f"{kind:<18}{sizes.num_tensors:>8}{before:>12}{after:>12}\n")
        return
    workspace = exporter.prepare()
    with exporter.lock:
        report(plan)
        if workspace.num_resumed:
            done = f"{workspace.num_resumed} of {len(plan.shards)} weight files"
            terminal.info(f"resuming: {done} were finished by an earlier run")
        elif workspace.has_cleaned:
            terminal.info("starting over: the unfinished earlier run had another source or other options")
        run(workspace)


def _run(
    exporter: lazy.export.Exporter, workspace: lazy.export_workspace.ExportWorkspace, destination: Path, verbose: bool
) -> None:
    def on_tensor(name: str, quality: lazy.rounding.TensorQuality) -> None:
        if verbose:
            terminal.info(
                f"{name}: error {quality.relative_rms_error:.3%}, worst row {quality.worst_row} "
                f"{quality.worst_row_error:.3%}, {quality.saturation:.2%} at the ends of the range"
            )

    qualities = run_export(exporter, workspace, f"quantizing to {destination}", on_tensor)
    total = exporter.plan.total
    terminal.info(
        f"{destination}: {decimal(total.bytes_before)} -> {decimal(total.bytes_after)} of weights, "
        f"{_largest_error(qualities)}"
    )


def _largest_error(qualities: Mapping[str, lazy.rounding.TensorQuality]) -> str:
    worst = max(qualities, key=lambda name: qualities[name].relative_rms_error)
    return f"largest error {qualities[worst].relative_rms_error:.2%} in {worst}"


def _scheme(bits: int, group_size: str, is_asymmetric: bool) -> WeightScheme:
    if bits not in BITS:
        raise UsageError(f"--bits is {bits}, expected 8 or 4")
    if is_asymmetric and bits != 4:
        raise UsageError("--asymmetric is for --bits 4; int8 gains nothing from it")
    size = GROUP_SIZES[chosen_word("--group-size", group_size, GROUP_SIZES)]
    return WeightScheme(bits, size, not is_asymmetric)


def _report_plan(plan: lazy.export_plan.ExportPlan) -> None:
    """Report what the user should know before the work starts."""
    if plan.options is not None and plan.channel_layers:
        terminal.warn(
            f"group size {plan.options.scheme.group_size} does not divide the input size of "
            f"these layers, which get one scale per row: {first_of(plan.channel_layers, _MAX_LISTED)}"
        )
    if plan.unties_head:
        size = decimal(plan.sizes["output head"].bytes_after)
        terminal.info(f"the output head is now stored apart from the embedding: {size} more")
    report_layers(plan)
