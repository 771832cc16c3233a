"""What a user should know of a model before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.cli.terminal import terminal

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model

_MAX_NAMED = 3


def warn_of(model: Model, name: str) -> None:
    """Say it, a line each; `name` is the model's."""
    if unused := model.tensors.unused:
        more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
        terminal.warn(f"{name} has tensors that its config does not use: {', '.join(unused[:_MAX_NAMED])}{more}")
    for note in model.notes:
        terminal.warn(f"{name}: {note}")
