"""`llmcli convert`: write a quantized model as compressed-tensors, code for code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from llmcli.checkpoint.export_options import DEFAULT_SHARD_BYTES
from llmcli.cli.completion import complete_model
from llmcli.cli.export import open_conversion
from llmcli.cli.export_report import parse_shard_size, report_earlier_run, report_layers, size_table
from llmcli.cli.groups import with_groups
from llmcli.cli.options import MessageOptions
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
from llmcli.errors import EXIT_INTERRUPTED, CheckpointError
from llmcli.foreign_errors import foreign_errors_explained

if TYPE_CHECKING:
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_workspace import ExportWorkspace


@dataclass(frozen=True)
class FileOptions:
    """What may be written, and in files of what size."""

    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB or 500MB.", hidden=True)
    ] = f"{DEFAULT_SHARD_BYTES // 10**9}GB"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes before and after; write nothing.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it is a model folder.")] = False


@with_groups
def convert(
    *,
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Model folder, or hub id such as ORG/NAME.", autocompletion=complete_model),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; it must not exist.")],
    files: FileOptions,
    messages: MessageOptions,
) -> None:
    """Write an AWQ, GPTQ or w8a8 model as compressed-tensors.

    Codes, scales and zero points stay the same; nothing is quantized again. Run the same command again to resume.

    Examples:

    llmcli convert my-awq my-int4

    llmcli convert ORG/NAME-GPTQ my-int4 --dry-run
    """
    shard_bytes = parse_shard_size(files.shard_size)
    with foreign_errors_explained(f"reading {source}", CheckpointError):
        exporter = open_conversion(source, destination, shard_bytes, replace=files.force, dry_run=files.dry_run)
    plan = exporter.plan
    if files.dry_run:
        report_layers(plan)
        terminal.write(size_table(plan))
        return
    workspace = exporter.prepare()
    with exporter.lock:
        report_layers(plan)
        report_earlier_run(workspace, len(plan.shards))
        _run(exporter, workspace, destination)


def _run(exporter: Exporter, workspace: ExportWorkspace, destination: Path) -> None:
    try:
        with progress(f"converting to {destination}") as on_progress:
            exporter.run(workspace, on_progress, lambda name, quality: None)
    except KeyboardInterrupt:
        terminal.info(f"Stopped: run the same command again to resume; finished files are in {workspace.folder}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    total = exporter.plan.total
    terminal.info(f"{destination}: {decimal(total.bytes_before)} -> {decimal(total.bytes_after)} of weights")
