"""The built-in model's batch, killed at random moments, writes what an undisturbed run writes."""

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from batch_runs import SEED, finish, num_lines, start, without_timings, write_prompts
from results import Llmcli

# As long as the option says.
pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]
ROWS = ("1", "4", "32")  # a run may resume with another number


def wait_for_lines(process: subprocess.Popen[bytes], output: Path, count: int) -> None:
    while process.poll() is None and num_lines(output) < count:
        time.sleep(0.02)


def test_a_batch_that_is_killed_again_and_again(llmcli: Llmcli, tmp_path: Path, num_batch_prompts: int) -> None:
    draw = random.Random(num_batch_prompts)
    source, undisturbed, output = (tmp_path / name for name in ("in.jsonl", "undisturbed", "out"))
    lines = write_prompts(source, num_batch_prompts, longest=60)
    flags = ("--ordered", "--threads", "1", "--rows")
    at_rest = start(source, undisturbed, *flags, "1")
    num_kills = max(num_batch_prompts // 100, 3)
    # One in four dies before it has added a line, while it reads, checks or loads.
    most = len(lines) * 9 // 10
    for place in sorted(0 if draw.random() < 0.25 else draw.randrange(1, most) for _ in range(num_kills)):
        process = start(source, output, *flags, draw.choice(ROWS))
        wait_for_lines(process, output, place)
        time.sleep(draw.uniform(0, 0.3 if place else 3))
        process.kill()
        process.communicate()
    assert "Resumed: " in finish(start(source, output, *flags, draw.choice(ROWS)))
    finish(at_rest)
    assert without_timings(output) == without_timings(undisturbed)
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(results) == len(lines)
    for index in {*draw.sample(range(len(lines)), max(num_batch_prompts // 40, 5))} - {2}:
        (tmp_path / "prompt").write_text(str(lines[index]["prompt"]), encoding="utf-8")
        place = ("--only", index + 1, "--max-new-tokens", lines[index]["max_new_tokens"])
        told = llmcli("generate", "--file", tmp_path / "prompt", *SEED, *place, "--json")
        expected, found = json.loads(told.stdout), dict(results[index])
        assert found.pop("id") == index + 1
        del found["timings"], expected["timings"]
        assert found == expected


def test_three_shards_that_are_killed_again_and_again(llmcli: Llmcli, tmp_path: Path, num_batch_prompts: int) -> None:
    """They run side by side; merged, they have the bytes of one run."""
    draw = random.Random(num_batch_prompts + 1)
    source, undisturbed, output = (tmp_path / name for name in ("in.jsonl", "undisturbed", "out"))
    most = len(write_prompts(source, num_batch_prompts, longest=60)) // 3
    finish(start(source, undisturbed, "--ordered"))
    num_kills = max(num_batch_prompts // 100, 2)
    shards = [f"{number}/3" for number in (1, 2, 3)]
    for _ in range(num_kills):
        running = [start(source, output, "--shard", shard, "--rows", draw.choice(ROWS)) for shard in shards]
        number = draw.choice((1, 2, 3))
        path = tmp_path / f"out.shard-{number}-of-3"
        wait_for_lines(running[number - 1], path, min(num_lines(path) + draw.randint(0, most // num_kills), most - 2))
        for process in running:
            process.kill()
            process.communicate()
    for shard in shards:
        finish(start(source, output, "--shard", shard))
    assert llmcli("batch", "merge", output).exit_code == 0
    assert without_timings(output) == without_timings(undisturbed)
