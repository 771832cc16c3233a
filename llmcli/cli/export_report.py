"""What commands that write models say and read alike: sizes, layers, earlier runs, the size of a weight file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.filesize import decimal

from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.checkpoint.export_plan import ExportPlan
    from llmcli.checkpoint.export_workspace import ExportWorkspace

_UNIT_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_MAX_LISTED = 8  # layers named in one line; the model card has them all


def parse_shard_size(text: str) -> int:
    """The bytes of a size such as 5GB.

    Raises: UsageError.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*(MB|GB|MiB|GiB)", text)
    num_bytes = int(float(match[1]) * _UNIT_BYTES[match[2]]) if match else 0
    if num_bytes < 1:
        raise UsageError(f"--shard-size is {text!r}, expected a size such as 5GB or 500MB")
    return num_bytes


def report_layers(plan: ExportPlan) -> None:
    """Say which layers stay as they are, which tensors are left out, and who may not take the result."""
    if plan.skipped:
        terminal.info(f"kept as they are: {listed(plan.skipped)}")
    if plan.model.tensors.unused:
        terminal.info(f"left out, not used by the model: {listed(plan.model.tensors.unused)}")
    for concern in plan.concerns:
        terminal.warn(concern)


def report_earlier_run(workspace: ExportWorkspace, num_shards: int) -> None:
    """Say what a run that was stopped has left."""
    if workspace.num_resumed:
        terminal.info(f"resuming: {workspace.num_resumed} of {num_shards} weight files were finished by an earlier run")
    elif workspace.has_cleaned:
        terminal.info("starting over: the unfinished earlier run had another source or other options")


def listed(names: tuple[str, ...]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def size_table(plan: ExportPlan) -> str:
    """Sizes by kind of tensor, before and after."""
    lines = [f"{'kind':<18}{'tensors':>8}{'before':>12}{'after':>12}\n"]
    for kind, sizes in {**plan.sizes, "all": plan.total}.items():
        before, after = decimal(sizes.bytes_before), decimal(sizes.bytes_after)
        lines.append(f"{kind:<18}{sizes.num_tensors:>8}{before:>12}{after:>12}\n")
    return "".join(lines)
