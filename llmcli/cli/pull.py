"""`llmcli pull`: download a model and print its folder."""

from typing import Annotated

import typer

from llmcli.checkpoint.hub_id import find_hub_id
from llmcli.cli.completion import complete_hub_id
from llmcli.cli.options import DebugOption, QuietOption
from llmcli.cli.session import fetch_model
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError


def pull(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="Hub id: ORG/NAME or ORG/NAME@REVISION.", autocompletion=complete_hub_id)
    ],
    update: Annotated[
        bool, typer.Option("--update", help="Look for a newer commit even if the model is in the cache.")
    ] = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Download a model into the hub's cache and print its folder.

    A download that was stopped resumes.

    Examples:

    llmcli pull HuggingFaceTB/SmolLM2-135M

    llmcli pull HuggingFaceTB/SmolLM2-135M@main --update
    """
    if find_hub_id(name) is None:
        raise UsageError(f"{name!r} is not of the form ORG/NAME or ORG/NAME@REVISION")
    terminal.write(f"{fetch_model(name, update)}\n")
