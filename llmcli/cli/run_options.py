"""The options of every command that generates: the model that runs, and how it runs."""

from dataclasses import dataclass
from typing import Annotated

import typer

from llmcli.cli.adapters import AdapterOption
from llmcli.cli.completion import complete_draft
from llmcli.cli.options import AUTO, MODEL_PANEL, ContextOption, DeviceOptions, ModelOption

DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="HOW",
        help="How to guess tokens ahead, for the same text sooner: auto, ngram (from the text so far), "
        "a smaller MODEL, or off.",
        autocompletion=complete_draft,
        rich_help_panel=MODEL_PANEL,
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """The model that runs, its adapters, its context, its device, and what drafts for it."""

    model: ModelOption = None
    adapter: AdapterOption = None
    context: ContextOption = None
    draft: DraftOption = AUTO
    devices: DeviceOptions = DeviceOptions()
