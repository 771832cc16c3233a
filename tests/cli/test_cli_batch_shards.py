"""`llmcli batch --shard` and `llmcli batch merge`: the texts of one run, whatever the number of shards."""

import json
import re
from pathlib import Path

import pytest
from results import Llmcli

from llmcli.batch.shards import load_record
from llmcli.runners.stepping import SteppingRunner

LINES = [
    {"prompt": "Hi"},
    {"prompt": "Hi", "id": "own"},
    {"prompt": "No", "seed": 4},
    {"custom_id": "theirs", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Yes"}},
    {"prompt": "Hi", "max_new_tokens": 3},
]


@pytest.fixture
def run(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> Llmcli:
    """Run the lines above, an empty one among them."""
    content = [json.dumps(line) for line in LINES]
    (tmp_path / "in").write_text("\n".join([*content[:2], "", *content[2:]]))
    flags = ("-m", tiny_llama, "--max-new-tokens", 6)
    return lambda output, *more: llmcli("batch", tmp_path / "in", tmp_path / output, *flags, *more)


def without_times(path: Path) -> str:
    return re.sub(r'"timings": {[^}]*}|"created": \d+', "", path.read_text())


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_text_does_not_depend_on_the_number_of_shards(
    run: Llmcli, llmcli: Llmcli, tmp_path: Path, count: int
) -> None:
    assert run("whole", "--seed", 5, "--ordered").exit_code == 0
    for number in range(count, 0, -1):
        assert run("out", "--seed", 5, "--shard", f"{number}/{count}", "--rows", 4).exit_code == 0
    told = llmcli("batch", "merge", tmp_path / "out")
    assert (told.exit_code, told.stdout) == (0, "")
    shards = "1 shard" if count == 1 else f"{count} shards"
    assert told.stderr == f"Merged: {tmp_path / 'out'} holds 5 results of {shards}\n"
    assert without_times(tmp_path / "out") == without_times(tmp_path / "whole")
    again = run("out", "--seed", 5)
    assert again.stderr.endswith(f"Nothing to do: {tmp_path / 'out'} holds all 5 results\n")


def test_shards_may_run_on_several_cards_of_a_machine(
    run: Llmcli, llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_shard(number: int, card: str) -> None:
        told = property(lambda _: f"NVIDIA {card}, int8 weights", lambda *_: None)
        monkeypatch.setattr(SteppingRunner, "description", told, raising=False)
        assert run("out", "--seed", 5, "--shard", f"{number}/3").exit_code == 0

    for number, card in ((1, "H200 (cuda:0)"), (2, "H200 (cuda:1)"), (3, "H100 (cuda:2)")):
        run_shard(number, card)
    assert load_record(tmp_path / "out.shard-2-of-3").runner == "NVIDIA H200, int8 weights"
    llmcli("batch", "merge", tmp_path / "out").expect_error(2, "NVIDIA H200, int8 weights", "NVIDIA H100, int8 weights")
    (tmp_path / "out.shard-3-of-3").unlink()
    run_shard(3, "H200 (cuda:2)")
    assert llmcli("batch", "merge", tmp_path / "out").exit_code == 0


def test_a_shard_whose_results_are_not_in_order_yet(run: Llmcli, llmcli: Llmcli, tmp_path: Path) -> None:
    """As after a kill between the last result and the sorting."""
    run("out", "--seed", 5, "--shard", "1/1")
    shard, record = (tmp_path / f"out.shard-1-of-1{end}" for end in ("", ".run.json"))
    whole = shard.read_text()
    shard.write_text("".join(reversed(whole.splitlines(keepends=True))))
    record.write_text(record.read_text().replace('"is_sorted": true', '"is_sorted": false'))
    llmcli("batch", "merge", tmp_path / "out").expect_error(2, "shard 1/1 was interrupted at its end; run these")
    assert run("out", "--seed", 5, "--shard", "1/1").exit_code == 0
    assert shard.read_text() == whole
    assert llmcli("batch", "merge", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out").read_text() == whole


def test_failed_prompts_are_merged_counted_and_tried_again(run: Llmcli, llmcli: Llmcli, tmp_path: Path) -> None:
    for number in (1, 2):
        run("out", "--seed", 5, "--shard", f"{number}/2")
    shard, record = (tmp_path / f"out.shard-2-of-2{end}" for end in ("", ".run.json"))
    whole = shard.read_text()
    lines = whole.splitlines(keepends=True)
    shard.write_text('{"id": "own", "error": {"message": "x"}}\n' + lines[1])
    told = llmcli("batch", "merge", tmp_path / "out")
    assert told.exit_code == 1
    assert "1 of 5 prompts failed; see their lines in " in told.stderr
    assert "remove out, run their shards again and merge again" in told.stderr
    assert run("out", "--seed", 5, "--shard", "2/2").exit_code == 0
    assert '"is_sorted": true' in record.read_text()
    assert without_times(shard) == re.sub(r'"timings": {[^}]*}|"created": \d+', "", whole)


def test_check_of_a_shard(run: Llmcli, tmp_path: Path) -> None:
    assert "prompts        3\n" in run("out", "--seed", 5, "--shard", "1/2", "--check").stdout
    assert "prompts        0\n" in run("out", "--seed", 5, "--shard", "7/7", "--check").stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_a_shard_needs(run: Llmcli, llmcli: Llmcli, tmp_path: Path) -> None:
    run("out", "--shard", "0/4", "-q").expect_error(2, "--shard is '0/4', expected I/N with I from 1 to N")
    run("out", "--shard", "5/4", "-q").expect_error(2, "--shard is '5/4', expected I/N with I from 1 to N")
    run("out", "--shard", "1/4", "-q").expect_error(2, "--shard needs --seed: all shards use the same one")
    told = llmcli("batch", tmp_path / "in", "-", "--shard", "1/4", "--seed", 1, "-q")
    told.expect_error(2, "--shard needs a file as OUT: the shards are merged later")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_merge_takes(llmcli: Llmcli, tmp_path: Path) -> None:
    told = llmcli("batch", "merge", tmp_path / "out", "--seed", 1, "--top-k", 2, "-m", "x", "--ordered")
    told.expect_error(2, "batch merge takes OUT alone; remove --ordered, --model, --seed, --top-k")
    llmcli("batch", "merge", "-").expect_error(2, "OUT is -, expected a file: batch merge reads its shards")
    llmcli("batch", "merge", tmp_path / "out").expect_error(2, "out has no shards, expected files such as ")
    llmcli("batch", "merge", tmp_path / "no" / "out").expect_error(2, "/no is not a folder")
    assert not (tmp_path / "no").exists()
