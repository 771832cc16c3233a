"""docs/receipts.md: its example runs as written, its tables name every key and flag, its lines are what is said."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from results import Result

from llmcli.errors import DifferentTextError
from llmcli.receipt.receipt import Receipt, RunnerFacts

TEXT = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text(encoding="utf-8")


def test_the_example_runs_as_written(
    llmcli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"^    llmcli (.+)$", TEXT, re.MULTILINE)
    prompt = re.search(r'"(.+?)"', first)
    assert prompt is not None
    arguments = [word.replace("\0", " ") for word in first.replace(prompt[0], prompt[1].replace(" ", "\0")).split()]
    told = llmcli(*arguments)
    again = llmcli(*second.split())
    assert (told.exit_code, again.exit_code, again.stdout) == (0, 0, told.stdout)
    shown = re.search(r"on stderr:\n\n((?:    .+\n)+)", TEXT)
    assert shown is not None
    assert again.stderr == re.sub(r"^    ", "", shown[1], flags=re.MULTILINE)
    content = json.loads(Path("story.json").read_text())
    assert set(content) - {"format", "version"} <= set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))


def test_the_tables_name_every_key_and_code() -> None:
    named = set(re.findall(r"`([\w.]+)`", TEXT))
    assert {field.name for field in fields(Receipt)} <= named
    assert {field.name for field in fields(RunnerFacts)} - {"description"} <= named
    assert f"| {DifferentTextError.exit_code} | another text |" in TEXT


def test_every_flag_exists(llmcli: Callable[..., Result]) -> None:
    told = llmcli("replay", "--help").stdout
    for flag in re.findall(r"^\| `(--[a-z]+)", TEXT, re.MULTILINE):
        assert flag in told, flag
