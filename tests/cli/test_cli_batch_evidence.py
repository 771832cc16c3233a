"""The built-in model's batch, killed at random moments, writes what an undisturbed run writes."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Result

ROOT = Path(__file__).resolve().parents[2]
SEED = ("--seed", "11")
ROWS = ("1", "4", "32")  # a run may resume with another number


def prompts(count: int, draw: random.Random) -> list[tuple[str, int]]:
    """Prompts of 1 to 60 words, and the most tokens of their texts."""
    words = (ROOT / "configs" / "texts" / "stories.txt").read_text(encoding="utf-8").split()
    found = []
    for _ in range(count):
        length = draw.randint(1, draw.choice((1, 3, 8, 20, 60)))
        begin = draw.randrange(len(words) - length)
        found.append((" ".join(words[begin : begin + length]), draw.randint(4, 12)))
    return found


def start(source: Path, output: Path, rows: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llmcli", "batch", source, output, *(flags or ("--ordered",)), "--rows", rows]
    command += SEED
    return subprocess.Popen([*map(str, command), "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> str:
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stderr.decode()


def write_prompts(path: Path, lines: list[tuple[str, int]]) -> None:
    values = [{"prompt": prompt, "max_new_tokens": count} for prompt, count in lines]
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")


def without_timings(content: bytes) -> bytes:
    return re.sub(rb'"timings": \{[^}]*\}, ', b"", content)


def kill(process: subprocess.Popen[bytes], output: Path, num_lines: int, delay: float) -> None:
    """Kill a run `delay` seconds after its output has a number of lines."""
    while process.poll() is None and num_lines > (output.read_bytes().count(b"\n") if output.exists() else 0):
        time.sleep(0.02)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.timeout(0)  # as long as the option says
def test_a_batch_that_is_killed_again_and_again(
    llmcli: Callable[..., Result], tmp_path: Path, num_batch_prompts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(line: str) -> None:
        with capsys.disabled():
            print(line)

    draw = random.Random(num_batch_prompts)
    lines = prompts(num_batch_prompts, draw)
    source, undisturbed, output = (tmp_path / name for name in ("in.jsonl", "undisturbed", "out"))
    write_prompts(source, lines)
    begin = time.perf_counter()
    at_rest = start(source, undisturbed, "1")
    num_kills = max(num_batch_prompts // 100, 3)
    # One in four dies before it has added a line, while it reads, checks or loads.
    places = sorted(0 if draw.random() < 0.25 else draw.randrange(1, len(lines) * 9 // 10) for _ in range(num_kills))
    for place in places:
        kill(start(source, output, draw.choice(ROWS)), output, place, draw.uniform(0, 0.3 if place else 3))
    last = finish(start(source, output, draw.choice(ROWS)))
    tell(f"killed {num_kills} times at {places} of {len(lines)} lines: {time.perf_counter() - begin:.0f} s")
    assert "Resumed: " in last
    finish(at_rest)
    tell(f"undisturbed, at the same time: {time.perf_counter() - begin:.0f} s")
    whole = undisturbed.read_bytes()
    assert without_timings(output.read_bytes()) == without_timings(whole)
    assert whole.count(b"\n") == len(lines)
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    begin = time.perf_counter()
    numbers = draw.sample(range(len(lines)), max(num_batch_prompts // 40, 5))
    for index in numbers:
        prompt, count = lines[index]
        (tmp_path / "prompt").write_text(prompt, encoding="utf-8")
        told = llmcli(
            "generate", "--file", tmp_path / "prompt", *SEED, "--only", index + 1, "--max-new-tokens", count, "--json"
        )
        expected = json.loads(told.stdout)
        found = dict(results[index])
        assert found.pop("id") == index + 1
        del found["timings"], expected["timings"]
        assert found == expected
    tell(f"{len(numbers)} lines by generate --only: {time.perf_counter() - begin:.0f} s")


@pytest.mark.timeout(0)  # as long as the option says
def test_three_shards_that_are_killed_again_and_again(
    llmcli: Callable[..., Result], tmp_path: Path, num_batch_prompts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run side by side; merged, they have the bytes of one run."""
    draw = random.Random(num_batch_prompts + 1)
    lines = prompts(num_batch_prompts, draw)
    source, undisturbed, output = (tmp_path / name for name in ("in.jsonl", "undisturbed", "out"))
    write_prompts(source, lines)
    begin = time.perf_counter()
    finish(start(source, undisturbed, "1"))
    num_kills = max(num_batch_prompts // 100, 2)
    for _ in range(num_kills):
        running = {number: start(source, output, draw.choice(ROWS), "--shard", f"{number}/3") for number in (1, 2, 3)}
        number = draw.choice((1, 2, 3))
        path = tmp_path / f"out.shard-{number}-of-3"
        num_lines = path.read_bytes().count(b"\n") if path.exists() else 0
        kill_at = min(num_lines + draw.randint(0, max(len(lines) // 3 // num_kills, 1)), len(lines) // 3 - 2)
        while running[number].poll() is None and kill_at > (path.read_bytes().count(b"\n") if path.exists() else 0):
            time.sleep(0.02)
        for process in running.values():
            process.kill()
            process.communicate()
    for number in (1, 2, 3):
        finish(start(source, output, "1", "--shard", f"{number}/3"))
    assert llmcli("batch", "merge", output).exit_code == 0
    assert without_timings(output.read_bytes()) == without_timings(undisturbed.read_bytes())
    assert output.read_bytes().count(b"\n") == len(lines)
    with capsys.disabled():
        print(f"three shards killed {num_kills} times: {time.perf_counter() - begin:.0f} s")
