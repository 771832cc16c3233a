"""docs/guide/batch.md: its example runs as written, its tables name every key, its jq recipe reads the results."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Result

from llmcli.batch.input import BODY_KEYS

TEXT = (Path(__file__).parents[2] / "docs" / "guide" / "batch.md").read_text(encoding="utf-8")


def command_lines(first_word: str) -> list[str]:
    joined = TEXT.replace("\\\n", "")
    return re.findall(rf"^    ({first_word} .+)$", joined, re.MULTILINE)


def test_the_example_runs_as_written(
    llmcli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (make,) = command_lines("printf")
    subprocess.run(["bash", "-c", make], check=True)
    runs = [line for line in command_lines("llmcli") if "prompts.jsonl" in line]
    assert len(runs) == 2
    first, second = (llmcli(*line.split()[1:]) for line in runs)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "Nothing to do: " in second.stderr
    results = {value["id"]: value for value in map(json.loads, Path("results.jsonl").read_text().splitlines())}
    assert results.keys() == {1, "dog", "owl"}
    owl = re.search(r'\{"id": "owl", "text".*?\}\n', TEXT, re.DOTALL)
    assert owl is not None
    assert re.findall(r'"(\w+)":', owl[0]) == list(results["owl"])
    assert (results["owl"]["seed"], len(results["owl"]["token_ids"])) == (7, 5)
    if shutil.which("jq"):
        (recipe,) = command_lines("jq")
        told = subprocess.run(["bash", "-c", recipe], check=True, capture_output=True, text=True).stdout
        assert sorted(line.split("\t")[0] for line in told.splitlines()) == ["1", "dog", "owl"]


def test_the_tables_name_every_key() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT))
    assert set(BODY_KEYS) <= named
    assert {"prompt", "messages", "id", "seed", "max_new_tokens", "stop", "custom_id", "method", "url", "body"} <= named


def test_every_flag_exists() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "llmcli", "batch", "--help"], capture_output=True, text=True, check=True
    )
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT)) - {"--only", "--json"}:  # those are generate's
        assert flag in told.stdout, flag
