"""Groups of options: what a command that takes them offers and receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from llmcli.cli.command import OptionEach, argument, option, with_groups
from llmcli.errors import UsageError


@dataclass(frozen=True)
class Inner:
    size: int = option(3, "How large.", min=1)
    names: list[str] | None = option(None, "Whose.", "--name")


@dataclass(frozen=True)
class Outer:
    color: str = option("red", "Which.", "--colour")
    inner: Inner = Inner()
    is_loud: bool = option(False, "Whether.", "--loud")

    def __post_init__(self) -> None:
        if self.color == "none":
            raise UsageError("there is no such colour")


Weights = Annotated[dict[str, Any], OptionEach({"warm": (float | None, option(None, "How warm."))})]


def run(*arguments: str) -> dict[str, Any]:
    """What the command received."""
    received: dict[str, Any] = {}

    @with_groups
    def paint(
        *, weights: Weights, last: str = option("z", "The last."), outer: Outer, what: str = argument(..., "What.")
    ) -> None:
        """Paint."""
        received.update(weights=weights, last=last, outer=outer, what=what)

    app = typer.Typer()
    app.command()(paint)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return received


def test_defaults() -> None:
    assert run("wall") == {"weights": {"warm": None}, "last": "z", "outer": Outer(), "what": "wall"}


def test_every_field_has_its_option() -> None:
    arguments = "--colour blue --size 5 --name a --name b --loud --warm 0.5 --last y wall"
    outer = Outer("blue", Inner(5, ["a", "b"]), is_loud=True)
    assert run(*arguments.split()) == {"weights": {"warm": 0.5}, "last": "y", "outer": outer, "what": "wall"}


def test_bounds_and_required_arguments_hold() -> None:
    with pytest.raises(typer.TyperException, match="greater than or equal to 1"):
        run("wall", "--size", "0")
    with pytest.raises(typer.TyperException):
        run()


def test_a_group_may_refuse() -> None:
    with pytest.raises(UsageError, match="no such colour"):
        run("wall", "--colour", "none")


def test_options_come_in_the_order_of_parameters_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = capsys.readouterr().out
    places = [text.index(option) for option in ("--warm", "--last", "--colour", "--size", "--name", "--loud")]
    assert places == sorted(places)
