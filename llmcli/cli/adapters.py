"""`--adapter`: LoRA adapters that are added to a model's weights while they are read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.checkpoint.hub_id import find_hub_id
from llmcli.cli import lazy
from llmcli.cli.completion import complete_adapter
from llmcli.cli.session import Session, fetch_model
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.checkpoint.adapter import Adapter
    from llmcli.checkpoint.model import Model

AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="DIR|ID[=WEIGHT]",
        help="Add a LoRA adapter to the model's 16-bit weights: a folder or hub id; repeatable.",
        autocompletion=complete_adapter,
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True)
class AdapterChoice:
    """An adapter by folder or hub id, and how often its product counts."""

    name: str
    weight: float = 1.0

    @property
    def text(self) -> str:
        """The value of --adapter for it."""
        return self.name if self.weight == 1 else f"{self.name}={self.weight!r}"


def parse_adapters(values: Sequence[str] | None) -> tuple[AdapterChoice, ...]:
    """The values of --adapter. What is there as a path is one, whether or not it looks like `PATH=WEIGHT`.

    Raises: UsageError for a weight that is not a number other than 0, and an adapter that is named twice
    """
    choices = tuple(_parse(value) for value in values or ())
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--adapter names {twice!r} twice; give it once, with a weight")
    return choices


def _parse(value: str) -> AdapterChoice:
    name, sign, number = value.rpartition("=")
    if not sign or os.path.exists(value):
        name, number = value, "1"
    if not name:
        raise UsageError(f"--adapter is {value!r}, expected a folder or a hub id")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise UsageError(f"--adapter is {value!r}, expected a number other than 0 as the weight, not {number!r}")
    return AdapterChoice(name, weight)


def with_adapters(session: Session, choices: Sequence[AdapterChoice]) -> Session:
    """The session with adapters in its model. Raises: CheckpointError and its subclasses."""
    if not choices:
        return session
    model = add_adapters(session.model, choices)
    return replace(session, model=model, name=" + ".join([session.name, *(one.shown_name for one in model.adapters)]))


def add_adapters(model: Model, choices: Sequence[AdapterChoice]) -> Model:
    """The model with adapters, which lines tell of; what the cache lacks is downloaded first.

    Raises: CheckpointError and its subclasses.
    """
    adapters = [_open(choice) for choice in choices]
    model = lazy.merge_adapters(model, adapters)
    for adapter in adapters:
        base = f", trained on {adapter.config.base_name}" if adapter.config.base_name else ""
        terminal.info(f"Adapter {adapter.shown_name}: LoRA of rank {adapter.config.rank}{base}")
    return model


def _open(choice: AdapterChoice) -> Adapter:
    is_on_hub = find_hub_id(choice.name) is not None
    folder = fetch_model(choice.name, is_adapter=True) if is_on_hub else Path(choice.name)
    return lazy.open_adapter(folder, choice.name, choice.weight)
