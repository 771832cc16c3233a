"""`llmcli convert`: write a quantized model as compressed-tensors, code for code."""

from __future__ import annotations

from rich.filesize import decimal

from llmcli.cli.command import with_groups
from llmcli.cli.export import open_conversion
from llmcli.cli.export_files import DestinationArgument, FileOptions, SourceArgument, run_export
from llmcli.cli.export_report import report_earlier_run, report_layers, size_table
from llmcli.cli.options import MessageOptions
from llmcli.cli.terminal import terminal
from llmcli.errors import CheckpointError
from llmcli.foreign_errors import foreign_errors_explained


@with_groups
def convert(
    *,
    source: SourceArgument,
    destination: DestinationArgument,
    files: FileOptions,
    messages: MessageOptions,
) -> None:
    """Write an AWQ, GPTQ or w8a8 model as compressed-tensors.

    Codes, scales and zero points stay the same; nothing is quantized again. Run the same command again to resume.

    Examples:

    llmcli convert my-awq my-int4

    llmcli convert ORG/NAME-GPTQ my-int4 --dry-run
    """
    shard_bytes = files.shard_bytes()
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
        run_export(exporter, workspace, f"converting to {destination}", lambda name, quality: None)
    total = plan.total
    terminal.info(f"{destination}: {decimal(total.bytes_before)} -> {decimal(total.bytes_after)} of weights")
