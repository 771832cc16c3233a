"""How torch's threads wait: asleep at once if others compute, after a moment if cores are free."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.cli import device_choice
from llmcli.cli.device_choice import choose_waiting

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the system's file. The machine has four cores, and nothing is set."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    path = tmp_path / "loadavg"
    monkeypatch.setattr(device_choice, "_LOAD", path)
    return path


# Running threads count the one that asks.
@pytest.mark.parametrize(
    ("running", "num_threads", "expected"),
    [
        (1, None, "10000"),
        (2, None, "0"),
        (9, None, "0"),
        (3, 2, "10000"),
        (4, 2, "0"),
        (4, 1, "10000"),
        (1, 6, "0"),
    ],
)
def test_threads_sleep_at_once_if_others_need_the_cores(
    running: int, num_threads: int | None, expected: str, load: Path
) -> None:
    load.write_text(f"0.56 1.91 1.52 {running}/834 15581\n")
    choose_waiting(num_threads)
    assert os.environ["GOMP_SPINCOUNT"] == expected


@pytest.mark.parametrize("content", [None, "", "0.5 0.5 0.5 x/7 8"])
def test_where_nothing_tells_the_cores_are_taken_to_be_free(content: str | None, load: Path) -> None:
    if content is not None:
        load.write_text(content)
    choose_waiting(None)
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_user_has_set_stays(name: str, load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    choose_waiting(None)
    assert dict(os.environ) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has GNU's OpenMP on Linux")
@pytest.mark.parametrize("command", [["generate", "Once", "--max-new-tokens", "2"], ["plan"]])
def test_openmp_reads_it(command: list[str]) -> None:
    """OpenMP itself reports what it has read: a late setting would leave 300000."""
    environment = {name: value for name, value in os.environ.items() if name not in device_choice._WAITING_VARIABLES}
    run = subprocess.run(
        [sys.executable, "-m", "llmcli", *command, "--device", "cpu", "--dtype", "float32"],
        cwd=ROOT,
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    counts = [line.split("'")[1] for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert counts[-1] in ("0", "10000"), run.stderr
