"""Shards of a batch: their names, and an output that is merged from complete ones only."""

import json
from pathlib import Path

import pytest

from llmcli.batch.shards import Merged, Record, Shard, find_shards, load_record, merge_shards, parse_shard, save_record
from llmcli.errors import UsageError


def write_shards(output: Path, num_prompts: int, count: int) -> list[Shard]:
    """Complete shards of an input whose ids are 1 to `num_prompts`."""
    shards = [Shard(number, count) for number in range(1, count + 1)]
    for shard in shards:
        ids = [index + 1 for index in range(num_prompts) if shard.has(index)]
        path = shard.output(output)
        path.write_text("".join(f'{{"id": {one}, "text": "ü"}}\n' for one in ids), encoding="utf-8")
        save_record(path, Record({"top_k": 3}, 7, "CPU" if ids else "", len(ids), is_sorted=True))
    return shards


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/4", "a/b", "", "1/4 ", "\u0661/4"])
def test_what_is_not_a_shard(text: str) -> None:
    with pytest.raises(UsageError, match="^--shard is .*, expected I/N with I from 1 to N, such as 1/4$"):
        parse_shard(text)


def test_every_prompt_is_in_one_shard() -> None:
    shards = [parse_shard(f"{number}/3") for number in (1, 2, 3)]
    owners = [[shard.has(index) for shard in shards if shard is not None] for index in range(7)]
    assert owners == [[index % 3 == place for place in range(3)] for index in range(7)]


@pytest.mark.parametrize(("num_prompts", "count"), [(7, 1), (7, 3), (6, 3), (2, 5), (12, 11)])
def test_merged_shards_are_in_order(tmp_path: Path, num_prompts: int, count: int) -> None:
    output = tmp_path / "out"
    shards = write_shards(output, num_prompts, count)
    assert find_shards(output) == shards
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert merge_shards(output, shards) == Merged(count, num_prompts, 0)
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [*range(1, num_prompts + 1)]
    assert load_record(output) == Record({"top_k": 3}, 7, "CPU", num_prompts, is_sorted=True)
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(tmp_path.iterdir())) == len(before) + 2


def test_failed_results_are_counted(tmp_path: Path) -> None:
    output = tmp_path / "out"
    shards = write_shards(output, 4, 2)
    shards[1].output(output).write_text('{"id": 2, "error": {"message": "x"}}\n{"id": 4, "text": ""}\n')
    assert merge_shards(output, shards) == Merged(2, 4, 1)


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out"
    shards = write_shards(output, 50, 5)
    paths = [shard.output(output) for shard in shards]
    paths[0].unlink()
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-1])  # a torn line is none
    (tmp_path / f"{paths[2].name}.run.json").unlink()
    save_record(paths[3], Record({"top_k": 3}, 7, "CPU", 10))  # all results, not yet in order
    assert find_shards(output) == shards
    with pytest.raises(UsageError) as caught:
        merge_shards(output, shards)
    assert str(caught.value) == (
        f"{output} cannot be merged: shard 1/5 is missing; shard 2/5 has 9 of 10 results; "
        "shard 3/5 has no record out.shard-3-of-5.run.json; shard 4/5 was interrupted at its end; "
        "run these shards, then merge again"
    )
    assert not output.exists()


def test_of_many_problems_ten_are_shown(tmp_path: Path) -> None:
    (tmp_path / "out.shard-1-of-99").touch()
    with pytest.raises(UsageError, match="shard 10/99 is missing; and 89 more; run these shards"):
        merge_shards(tmp_path / "out", find_shards(tmp_path / "out"))


def test_shards_of_other_settings_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    shards = write_shards(output, 4, 2)
    for other, message in (
        (Record({"top_k": 4}, 7, "CPU", 2, is_sorted=True), "shard-2-of-2 was made with top_k 4, now 3: "),
        (Record({"top_k": 3}, 8, "CPU", 2, is_sorted=True), "seed 8, now 7: "),
        (Record({"top_k": 3}, 7, "H200", 2, is_sorted=True), "device 'H200', now 'CPU': "),
    ):
        save_record(shards[1].output(output), other)
        with pytest.raises(UsageError, match=message):
            merge_shards(output, shards)
    assert not output.exists()


def test_what_is_not_a_result_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    shards = write_shards(output, 4, 2)
    shards[1].output(output).write_text('{"id": 2}\nnonsense\n')
    with pytest.raises(UsageError, match="shard-2-of-2 line 2 is not a result of llmcli batch; remove the shard and"):
        merge_shards(output, shards)
    assert not output.exists()


def test_outputs_that_cannot_be_merged(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(UsageError, match=r"out has no shards, expected files such as out\.shard-1-of-4; run "):
        find_shards(output)
    shards = write_shards(output, 4, 2)
    output.write_text("mine\n")
    with pytest.raises(UsageError, match="out exists; remove it to merge again, or name another output"):
        merge_shards(output, shards)
    assert output.read_text() == "mine\n"
    write_shards(output, 4, 3)
    with pytest.raises(
        UsageError, match="out has shards of 2 and of 3; keep those of one number and remove the others"
    ):
        find_shards(output)
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        find_shards(tmp_path / "none" / "out")
