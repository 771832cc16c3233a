"""docs/guide/coming-from-llama.cpp.md: each of our flags that it names exists, and it is right about sampling."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from results import Result

from llmcli.cli.command import add_command
from llmcli.cli.commands import COMMANDS
from llmcli.sampling.params import DEFAULT_ORDER

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "coming-from-llama.cpp.md"
TEXT = PAGE.read_text(encoding="utf-8")


def options_of(command: str) -> set[str]:
    """Every way to write an option of one of our commands."""
    entry = next(entry for entry in COMMANDS if entry.name == command)
    app = typer.Typer()
    add_command(app, command, getattr(importlib.import_module(f"llmcli.cli.{entry.module}"), entry.attribute))
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def table_rows() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_row_has_their_flag_ours_and_the_difference() -> None:
    rows = table_rows()
    assert len(rows) > 40
    assert all(len(row) == 3 and row[0] and row[1] for row in rows)


def test_each_of_our_flags_in_the_table_exists() -> None:
    known = options_of("generate")
    named = 0
    for _, ours, _ in table_rows():
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ours):
            assert flag in known, flag
            named += 1
    assert named > 30


def test_each_example_is_a_command_line_of_ours(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    """They run, on another model and for a few tokens."""
    examples = re.findall(r'^    llmcli generate "Once upon a time" (.+)$', TEXT, re.MULTILINE)
    assert len(examples) == 3
    for flags in examples:
        result = llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 3, *flags.split())
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("flag", ["--chat", "--show-prompt", "--penalty-window", "--dry-breaker", "--sampler-order"])
def test_flags_beyond_the_table_exist_too(flag: str) -> None:
    assert flag in TEXT
    assert flag in options_of("generate")


def test_the_order_for_llama_cpp_holds_every_step_but_mirostat() -> None:
    order = re.search(r"--sampler-order (\S+temperature)\n", TEXT)
    assert order is not None
    assert set(order[1].split(",")) == set(DEFAULT_ORDER) - {"mirostat"}
