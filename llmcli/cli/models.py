"""`llmcli models` and `pull`: what the hub's cache holds, and a download into it. `presets`: sampling by name."""

import sys
from datetime import UTC, datetime

import typer
from rich.filesize import decimal

from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.cli import lazy
from llmcli.cli.command import argument, command_group, option
from llmcli.cli.completion import complete_hub_id
from llmcli.cli.options import MessageOptions, debug_option
from llmcli.cli.session import fetch_model
from llmcli.cli.tables import aligned_lines
from llmcli.cli.terminal import fact_lines, terminal, visible
from llmcli.errors import UsageError
from llmcli.resources import user_presets_folder


def pull(
    *,
    name: str = argument(..., "Hub id: ORG/NAME or ORG/NAME@REVISION.", metavar="ID", complete=complete_hub_id),
    update: bool = option(False, "Look for a newer commit even if the model is in the cache."),
    messages: MessageOptions,
) -> None:
    """Download a model into the hub's cache and print its folder.

    After a stop, files that are whole are not downloaded again.

    Examples:

    llmcli pull HuggingFaceTB/SmolLM2-135M

    llmcli pull HuggingFaceTB/SmolLM2-135M@main --update
    """
    if find_hub_id(name) is None:
        raise UsageError(f"{name!r} is not of the form ORG/NAME or ORG/NAME@REVISION")
    terminal.write(f"{fetch_model(name, update)}\n")


def presets(
    *,
    json_: bool = option(False, "Print one JSON object instead of a table."),
    debug: bool = debug_option(),
) -> None:
    """List the presets for --preset, built-in and your own.

    Examples:

    llmcli presets

    llmcli generate "Once upon a time" --preset story
    """
    found = lazy.list_presets()
    if json_:
        terminal.write_json(
            {
                preset.name: {
                    "description": preset.description,
                    "sampling": dict(preset.sampling),
                    "path": str(preset.path),
                }
                for preset in found
            }
        )
        return
    for preset in found:
        values = "  ".join(f"{name} {value}" for name, value in preset.sampling.items())
        lines = (("", preset.description), ("", values), ("", str(preset.path)))
        terminal.write(f"{preset.name}\n{fact_lines(lines, 2, sys.stdout)}")
    terminal.info(f"your own presets go to {user_presets_folder()}")


def list_models(
    *,
    json_: bool = option(False, "Print a JSON array instead of a table."),
    debug: bool = debug_option(),
) -> None:
    """List the models in the hub's cache, whichever program downloaded them.

    Examples:

    llmcli models list

    llmcli models list --json
    """
    found = lazy.list_cached_models()
    for line in found.unreadable:
        terminal.warn(line)
    if json_:
        terminal.write_json(
            [
                {
                    "id": model.repo_id,
                    "revision": model.commit,
                    "refs": list(model.refs),
                    "size_bytes": model.size_bytes,
                    "last_used": datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds"),
                    "complete": model.is_complete,
                    "model_type": model.model_type,
                    "folder": str(model.folder),
                }
                for model in found.models
            ]
        )
        return
    if not found.models:
        terminal.info(f"no models in {found.cache}")
        return
    rows = [("ID", "REVISION", "SIZE", "LAST USED", "TYPE", "STATE")]
    for model in found.models:
        rows.append(
            (
                model.repo_id,
                ", ".join(model.refs) or model.commit,
                decimal(model.size_bytes),
                f"{datetime.fromtimestamp(model.last_used):%Y-%m-%d}",
                model.model_type or "-",
                "complete" if model.is_complete else "incomplete",
            )
        )
    terminal.write("".join(f"{line}\n" for line in aligned_lines(rows, "<" * len(rows[0]))))


def remove_model(
    *,
    name: str = argument(
        ..., "Hub id; with @REVISION, remove only that branch, tag or commit.", metavar="ID", complete=complete_hub_id
    ),
    yes: bool = option(False, "Do not ask for confirmation.", "-y"),
    messages: MessageOptions,
) -> None:
    """Remove a model from the hub's cache.

    Examples:

    llmcli models rm HuggingFaceTB/SmolLM2-135M

    llmcli models rm HuggingFaceTB/SmolLM2-135M@main --yes
    """
    hub_id = find_hub_id(name)
    if hub_id is None:
        raise UsageError(f"{name!r} is not of the form ORG/NAME; `llmcli models list` shows the models in the cache")
    removal = lazy.plan_removal(hub_id)
    size = decimal(removal.freed_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"cannot ask whether to remove {hub_id} ({size}): no terminal; add --yes")
        count = len(removal.commits)
        if not typer.confirm(visible(f"Remove {hub_id} ({count} revision{'s' * (count > 1)}, {size})?"), err=True):
            terminal.info("nothing removed")
            return
    removal.execute()
    terminal.info(f"removed {hub_id}, {size} freed")


models_app = command_group("List or remove downloaded models.", {"list": list_models, "rm": remove_model})
