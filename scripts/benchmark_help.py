"""How long `llmcli --help` takes, process start to exit, beside an empty Python program in the same run."""

import statistics
import subprocess
import sys
import time

RUNS = 21
LIMIT_SECONDS = 0.25


def median_seconds(*arguments: str) -> tuple[float, float, float]:
    """Median, fastest and slowest of RUNS runs of this Python with `arguments`, after one to warm up."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), min(times[1:]), max(times[1:])


if __name__ == "__main__":
    print(f"{'program':<24} {'median':>8} {'fastest':>8} {'slowest':>8}   ({RUNS} runs)")
    for name, arguments in (
        ("python -c pass", ("-c", "pass")),
        ("import typer", ("-c", "import typer")),
        ("llmcli --help", ("-m", "llmcli", "--help")),
        ("llmcli generate --help", ("-m", "llmcli", "generate", "--help")),
    ):
        median, fastest, slowest = median_seconds(*arguments)
        print(f"{name:<24} {median:>6.3f} s {fastest:>6.3f} s {slowest:>6.3f} s")
    print(f"limit for --help: {LIMIT_SECONDS} s")
