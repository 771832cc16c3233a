"""What `quantize` and `convert` share on the command line: source and destination, what is written, and the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.checkpoint.export_options import DEFAULT_SHARD_BYTES
from llmcli.cli.completion import complete_model
from llmcli.cli.export_report import parse_shard_size
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
from llmcli.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_workspace import ExportWorkspace
    from llmcli.quantization.rounding import TensorQuality

SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="Model folder, or hub id such as ORG/NAME.", autocompletion=complete_model)
]
DestinationArgument = Annotated[
    Path, typer.Argument(readable=False, metavar="DST", help="Folder to write; it must not exist.")
]


@dataclass(frozen=True)
class FileOptions:
    """What may be written, and in files of what size."""

    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB or 500MB.", hidden=True)
    ] = f"{DEFAULT_SHARD_BYTES // 10**9}GB"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes before and after; write nothing.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it is a model folder.")] = False

    def shard_bytes(self) -> int:
        """The size of the largest file. Raises: UsageError for a size that is none."""
        return parse_shard_size(self.shard_size)


def run_export(
    exporter: Exporter, workspace: ExportWorkspace, doing: str, on_tensor: Callable[[str, TensorQuality], None]
) -> dict[str, TensorQuality]:
    """Write the export under a progress bar named `doing`; a Ctrl-C ends the command and says how to go on."""
    try:
        with progress(doing) as on_progress:
            return exporter.run(workspace, on_progress, on_tensor)
    except KeyboardInterrupt:
        terminal.info(f"Stopped: run the same command again to resume; finished files are in {workspace.folder}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
