"""Compares `batch` with `generate -n` on the built-in model: as many texts of as many tokens, in alternating runs.

    python -m scripts.benchmark_batch [--texts N] [--tokens N] [--runs N] [--rows N|auto]

Prints ratios alone: what a token takes depends on the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "Once upon a time"


def seconds(*arguments: object) -> float:
    """The time of a command in a process of its own, start and loading included."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llmcli", *map(str, arguments)], check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--rows", default="auto")
    options = parser.parse_args()
    common = ("--seed", 1, "--max-new-tokens", options.tokens, "--ignore-eos", "--quiet")
    times: dict[str, list[float]] = {"batch": [], "generate": []}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        source.write_text(f"{json.dumps({'prompt': PROMPT})}\n" * options.texts)
        for _ in range(options.runs):
            for command, arguments in (
                ("batch", ("batch", source, "-", *common, "--rows", options.rows)),
                ("generate", ("generate", PROMPT, "-n", options.texts, "--json", *common)),
            ):
                times[command].append(seconds(*arguments))
    for name, of in (("medians", statistics.median), ("fastest", min)):
        print(f"batch takes {of(times['batch']) / of(times['generate']):.2f} times as long as generate -n, by {name}")


if __name__ == "__main__":
    main()
