"""The server's benchmark runs to its end without a card."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_a_device_without_a_model() -> None:
    sizes = ("--clients", "2", "--texts", "4", "--prompt", "8", "--tokens", "8", "--rounds", "1")
    command = [sys.executable, "-m", "scripts.benchmark_serve", "--step-ms", "1", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of the rate of batch" in done.stdout
