"""`--stats start`: the table and its JSON, the option that may stand alone, and the age of a process."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from results import Llmcli

from llmcli.cli.command import with_values
from llmcli.cli.generate import process_age
from llmcli.cli.output.base import BAR_CELLS, start_json, start_table
from llmcli.timeline import Timeline


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path) -> Llmcli:
    return lambda *arguments: llmcli("generate", "-m", tiny_llama, "--max-new-tokens", 3, "--seed", 1, *arguments)


def seconds(cell: str) -> float:
    return float(re.search(r"([\d.]+) s", cell)[1])


def test_the_parts_add_up_to_the_time_from_the_process_start(generate: Llmcli) -> None:
    result = generate("Hi", "--stats", "start")
    assert result.stdout == generate("Hi").stdout
    _, header, *rows, last = result.stderr.splitlines()
    assert header.split() == ["part", "begins", "takes", "share"]
    total = seconds(rows[-1])
    assert rows[-1].startswith("start to first token")
    counted = [float(re.search(r"([\d.]+) s +[\d.]+%", row)[1]) for row in rows[:-1]]
    assert sum(counted) == pytest.approx(total, abs=0.0005 * (len(rows) + 1))  # each is rounded
    # This process is that of the tests, which have been running for a while.
    assert rows[0].split()[:5] == ["interpreter", "and", "imports", "0.000", "s"]
    assert counted[0] > 0.5 * total
    assert last.startswith("largest part: interpreter and imports, ")
    assert f"{max(counted):.3f} s of {total:.3f} s" in last


def test_json_has_the_same(generate: Llmcli) -> None:
    start = json.loads(generate("Hi", "--json", "--stats", "start", "--dtype", "float32").stdout)["start"]
    names = [part["name"] for part in start["parts"] if not part["beside"]]
    assert names[0] == "interpreter and imports"
    assert names[-5:] == ["tokenizer", "import of torch", "read and convert weights", "prefill", "first sample"]
    counted = sum(part["seconds"] for part in start["parts"] if not part["beside"])
    assert counted + start["other_seconds"] == pytest.approx(start["seconds"])
    assert 0 <= start["other_seconds"] < start["seconds"]
    begins = [part["begin_seconds"] for part in start["parts"]]
    assert begins == sorted(begins)
    *_, line = generate("Hi", "--jsonl", "--stats", "start").stdout.splitlines()
    assert {"type", "seconds", "parts", "other_seconds"} == set(json.loads(line))
    assert "start" not in json.loads(generate("Hi", "--json", "--stats").stdout)


def test_stats_alone_is_what_it_was(generate: Llmcli) -> None:
    stderr = generate("--stats", "Hi").stderr
    assert "time to first token" in stderr
    assert "interpreter" not in stderr
    assert generate("--stats", "Hi").stdout == generate("Hi", "--stats").stdout == generate("Hi").stdout
    for kind in ("run", "start"):  # the requested output is shown, lines about the run are not
        told = generate("Hi", f"--stats={kind}", "--quiet").stderr
        assert ("time to first token" in told, "interpreter" in told) == (kind == "run", kind == "start")
        assert "CPU" not in told
    generate("Hi", "--stats=bars").expect_error(2, "--stats is 'bars'", "start")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--stats", "--stats=run"),
        ("--stats start", "--stats=start"),
        ("--stats Hi start", "--stats=run Hi start"),
        ("Hi --stats --json", "Hi --stats=run --json"),
        ("--stats=start Hi", "--stats=start Hi"),
        ("--stop --stats --stats", "--stop --stats --stats=run"),
        ("--json -- --stats", "--json -- --stats"),
        ("--stop", "--stop"),
    ],
)
def test_an_option_that_may_stand_alone(arguments: str, expected: str) -> None:
    assert [argument for argument, _ in with_values(arguments.split(), {"--stop"})] == expected.split()


def test_the_table_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that take turns share cells, parallel work is not in the sum, short parts are in `other`."""
    timeline = Timeline()
    now = 0.0
    monkeypatch.setattr(timeline, "now", lambda: now)

    def until(end: float) -> None:
        nonlocal now
        now = end

    with timeline.beside("context"):
        until(0.5)
    timeline.since("interpreter and imports", 0.0)
    for begin in (0.5, 0.51, 0.52, 0.53):
        with timeline.part("read"):
            until(begin + 0.005)
        with timeline.part("upload"):
            until(begin + 0.01)
    until(0.9)
    for name, end in (("kernels", 0.9004), ("card's memory", 0.9008), ("matrix library", 0.9012)):
        with timeline.part(name):
            until(end)
    timeline.note("kernels", "20, from the cache")
    until(1.0)
    timeline.finish()
    lines = start_table(timeline)
    assert lines[1] == f"interpreter and imports  0.000 s  0.500 s   50.0%  {'█' * (BAR_CELLS // 2)}"
    assert lines[2] == f"context                  0.000 s  0.500 s  beside  {'█' * (BAR_CELLS // 2)}"
    assert lines[3].split()[:6] == ["read", "0.500", "s", "0.020", "s", "2.0%"]
    # A cell is 0.025 s: reads take 0.015 s of the first and 0.005 s of the second, uploads 0.01 s of each.
    assert [lines[row].split()[-1] for row in (3, 4)] == ["▓░", "▒▒"]
    assert lines[5].split() == ["other", "0.460", "s", "46.0%"]
    assert lines[6].split()[-3:] == ["1.000", "s", "100.0%"]
    assert lines[7].startswith("beside: ")
    assert lines[8] == "largest part: interpreter and imports, 0.500 s of 1.000 s (50.0%)"
    (kernels,) = [part for part in start_json(timeline)["parts"] if part["name"] == "kernels"]
    assert kernels["note"] == "20, from the cache"
    assert kernels["seconds"] == pytest.approx(0.0004)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux knows when a process was started")
def test_the_age_of_a_process() -> None:
    program = "import time; time.sleep(0.5); from llmcli.cli.generate import process_age; print(process_age())"
    start = time.perf_counter()
    age = float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert 0.5 <= age + 0.01 <= time.perf_counter() - start + 0.02  # a clock of hundredths of a second


def test_elsewhere_computing_time_stands_for_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    before = time.process_time()
    assert before <= process_age() <= time.process_time()
