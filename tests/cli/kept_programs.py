"""The parsers of command lines, each built once: building one takes longer than most commands of a tiny model."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import typer

from llmcli.cli import main

_build_app, _get_command = main._build_app, typer.main.get_command


@cache
def _program(called: str | None) -> Any:
    return _get_command(_build_app([called] if called else []))


def keep_programs(patch: pytest.MonkeyPatch) -> None:
    """Let a command line take the parser of an earlier one with the same command."""

    def build_app(arguments: Sequence[str]) -> Any:
        if "--help-all" in arguments:  # which changes the parser
            return _build_app(arguments)
        return next((argument for argument in arguments if not argument.startswith("-")), None)

    def get_command(app: Any) -> Any:
        return _get_command(app) if isinstance(app, typer.Typer) else _program(app)

    patch.setattr(main, "_build_app", build_app)
    patch.setattr(typer.main, "get_command", get_command)
