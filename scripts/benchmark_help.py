"""How long `llmcli --help` takes, process start to exit, next to an empty Python program in the same run."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 21
LIMIT_SECONDS = 0.25


PYTHON = sys.executable
LLMCLI = str(Path(sys.executable).with_name("llmcli"))  # the console script, as users start it


def median_seconds(*command: str) -> tuple[float, float, float]:
    """Median, fastest and slowest of RUNS runs of a command, after one to warm up."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), min(times[1:]), max(times[1:])


if __name__ == "__main__":
    print(f"{'program':<24} {'median':>8} {'fastest':>8} {'slowest':>8}   ({RUNS} runs)")
    for name, command in (
        ("python -c pass", (PYTHON, "-c", "pass")),
        ("import typer and rich", (PYTHON, "-c", "import typer.rich_utils")),
        ("llmcli --help", (LLMCLI, "--help")),
        ("llmcli generate --help", (LLMCLI, "generate", "--help")),
    ):
        median, fastest, slowest = median_seconds(*command)
        print(f"{name:<24} {median:>6.3f} s {fastest:>6.3f} s {slowest:>6.3f} s")
    print(f"limit for --help: {LIMIT_SECONDS} s")
