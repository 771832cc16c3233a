"""Nsight Compute as a child process: where it is found, its arguments, and the messages of its failures."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_ncu import STALL, FakeNcu

from llmcli.errors import DeviceError
from llmcli.lab import nsight
from llmcli.lab.nsight import count, find_ncu, metrics_for


def install(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "ncu"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a profiler; the root of its files."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(nsight, "_ROOT", tmp_path)
    return tmp_path


def test_without_a_profiler_the_way_to_it_is_named(bare: Path) -> None:
    with pytest.raises(DeviceError, match=r"developer\.nvidia\.com/nsight-compute.*bench needs no profiler") as raised:
        find_ncu()
    assert raised.value.exit_code == 4


def test_the_nearest_profiler_is_taken(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place wins over those filled before it."""
    (bare / "usr/local/cuda-12.0/bin").mkdir(parents=True)  # a toolkit without it
    unusable = install(bare / "opt/nvidia/nsight-compute/2029.1.0")
    unusable.chmod(0o644)
    for folder in (
        "usr/local/NVIDIA-Nsight-Compute-2025.1",
        "opt/nvidia/nsight-compute/2024.9.1",
        "opt/nvidia/nsight-compute/2024.10.0",
        "usr/local/cuda/bin",
        "usr/local/cuda-12.9/bin",
        "usr/local/cuda-13.0/bin",
    ):
        program = install(bare / folder)
        assert find_ncu() == program
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert find_ncu() == program  # nothing there yet
    program = install(bare / "home" / "bin")
    assert find_ncu() == program
    assert find_ncu() == program
    program = install(bare / "bin")
    assert find_ncu() == program


def test_what_it_is_asked_for(ncu: FakeNcu) -> None:
    count(ncu.path, ["python", "-c", "a program", "--csv"], "sm_90")
    ((locale, *arguments),) = ncu.calls
    assert locale == "C"
    assert arguments[-4:] == ["python", "-c", "a program", "--csv"]
    options = arguments[:-4]
    assert options.count("--csv") == 1
    for option, value in (
        ("--page", "raw"),
        ("--print-units", "base"),
        ("--profile-from-start", "off"),
        ("--clock-control", "none"),
        ("--cache-control", "all"),
        ("--target-processes", "all"),
        ("--metrics", ",".join(metrics_for("sm_90"))),
    ):
        assert options[options.index(option) + 1] == value


@pytest.mark.parametrize("does", ["", "regex"])
def test_metrics_that_it_does_not_know_are_left_out(ncu: FakeNcu, does: str) -> None:
    """ncu's versions name them in two ways."""
    gmma, memory = STALL.format("gmma"), "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    ncu.write(does, unknown=(gmma, memory))
    counters = count(ncu.path, ["program"], "sm_90")
    assert counters.memory_share is None
    assert counters.seconds == pytest.approx(9.312e-6)
    first, second = (call[call.index("--metrics") + 1].split(",") for call in ncu.calls)
    assert [metric for metric in first if metric not in (gmma, memory)] == second


def test_a_profiler_that_knows_no_metric_fails(ncu: FakeNcu) -> None:
    ncu.write(unknown=tuple(metrics_for("sm_80")))
    with pytest.raises(DeviceError, match="exit code 9: .*Failed to create the profiler"):
        count(ncu.path, ["program"], "sm_80")
    assert len(ncu.calls) == 1


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("permission", r"ERR_NVGPUCTRPERM.*sudo.*--cap-add=SYS_ADMIN.*NVreg_RestrictProfilingToAdminUsers=0"),
        ("crash", r"exit code 1: .*card's memory is full.*The application returned an error code \(1\)"),
        ("garbage", r"ncu counted nothing: "),
        ("nothing", r"ncu counted nothing: .*No kernels were profiled"),
        ("killed", r"ncu was ended by signal 9: .*"),
    ],
)
def test_a_failure_says_what_it_was(ncu: FakeNcu, does: str, message: str) -> None:
    ncu.write(does)
    with pytest.raises(DeviceError, match=message) as raised:
        count(ncu.path, ["program"], "sm_90")
    assert "==PROF==" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_profiler_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"nothing does not start: No such file"):
        count(tmp_path / "nothing", ["program"], "sm_90")


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
def test_an_interrupt_ends_the_profiler_and_its_program(ncu: FakeNcu) -> None:
    ncu.write("hang")
    code = (
        f"from pathlib import Path; from llmcli.lab.nsight import count; count(Path({str(ncu.path)!r}), ['x'], 'sm_90')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        noted = Path(f"{ncu.log}.child")
        deadline = time.monotonic() + 60
        while not (noted.exists() and noted.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = psutil.Process(int(noted.read_text()))
        profiler = child.parent()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in stderr
    assert process.returncode in (1, 130, -signal.SIGINT)
    for one in (child, profiler):
        assert one is not None
        psutil.wait_procs([one], timeout=10)
        assert not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
