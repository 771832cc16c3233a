"""Nsight Compute: where it is found, its arguments and failures; its CSV read into figures, and the limit they show."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_ncu import AUTO_UNITS, AUTO_VALUES, STALL, UNITS, VALUES, FakeNcu

from llmcli.errors import DeviceError
from llmcli.kernels.compiler import KernelResources
from llmcli.lab import nsight
from llmcli.lab.nsight import Counters, count, counters_of, find_limit, find_ncu, metrics_for, read_launches
from llmcli.lab.occupancy import Occupancy
from llmcli.lab.walk import KernelUse


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


ABOUT = ("ID", "Kernel Name", "CC")


def table(metrics: dict[str, tuple[str, str]], num_launches: int = 1) -> str:
    """Value and unit by metric, as ncu writes them."""

    def line(*cells: str) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    names, units = line(*ABOUT, *metrics), line("", "", "", *(unit for _, unit in metrics.values()))
    launches = [
        line(str(number), "gemv", "9.0", *(value for value, _ in metrics.values())) for number in range(num_launches)
    ]
    return "\n".join([names, units, *launches])


@pytest.mark.parametrize(("values", "units"), [(VALUES, UNITS), (AUTO_VALUES, AUTO_UNITS)], ids=["base", "scaled"])
def test_medians_in_seconds_bytes_and_shares(ncu: FakeNcu, values: dict[str, list[str]], units: dict[str, str]) -> None:
    """Each figure is the second of its three values by hand; both forms of units give the same."""
    ncu.write(values=values, units=units)
    counters = count(ncu.path, ["program"], "sm_90")
    assert counters.num_launches == 3
    assert counters.seconds == pytest.approx(9.312e-6)
    assert counters.read_bytes == pytest.approx(34_100_224)
    assert counters.written_bytes == pytest.approx(32)
    assert counters.num_bytes == pytest.approx(34_100_256)
    assert counters.memory_share == pytest.approx(0.782)
    assert counters.l2_share == pytest.approx(0.312)
    assert counters.compute_share == pytest.approx(0.402)
    assert counters.l1_hit_share == pytest.approx(0.0125)
    assert counters.l2_hit_share == pytest.approx(0.03)
    assert counters.occupancy == pytest.approx(0.242)
    assert counters.issue_share == pytest.approx(0.19)
    # Of 10 warps: 6, 2 and 1 wait, 1 issues.
    assert list(counters.stalls.items()) == [
        ("long_scoreboard", pytest.approx(0.6)),
        ("barrier", pytest.approx(0.2)),
        ("wait", pytest.approx(0.1)),
    ]


@pytest.mark.parametrize(
    ("value", "unit"), [("n/a", ""), ("", ""), ("(!) nan", "%"), ("nan", "%"), ("inf", "%"), ("5", "furlong")]
)
def test_a_figure_that_is_not_there_leaves_the_others(value: str, unit: str) -> None:
    metrics = {"lts__t_sector_hit_rate.pct": (value, unit), "gpu__time_duration.sum": ("1.5", "msecond")}
    counters = counters_of(read_launches(table(metrics)))
    assert counters.l2_hit_share is None
    assert counters.seconds == pytest.approx(1.5e-3)
    assert (counters.num_bytes, counters.memory_share, counters.stalls) == (None, None, {})


def test_lines_around_the_table_are_left_out() -> None:
    text = table({"gpu__time_duration.sum": ("1,234", "nsecond")}, 2)
    noisy = f'==PROF== Connected\nprinted, by "the program\n{text}\n==PROF== Disconnected\n"3","cut off\n'
    launches = read_launches(noisy)
    assert [one["gpu__time_duration.sum"] for one in launches] == [("1,234", "nsecond")] * 2


@pytest.mark.parametrize("text", ["", "\n\n", "ID", '"ID"\n', '"ID","CC"\n"",""\n', "==ERROR== no", '"', "\0,\r\n"])
def test_without_a_table_there_are_no_launches(text: str) -> None:
    assert read_launches(text) == []


def test_stalls_that_were_never_seen_are_no_shares() -> None:
    """A kernel that never issued: all zero."""
    assert counters_of(read_launches(table({STALL.format("wait"): ("0", "inst")}))).stalls == {}


def test_an_architecture_is_asked_for_the_states_that_it_has() -> None:
    metrics = {arch: metrics_for(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")}
    assert {arch for arch, names in metrics.items() if STALL.format("gmma") in names} == {"sm_90"}
    assert {arch for arch, names in metrics.items() if STALL.format("imc_miss") in names} == {"sm_80", "sm_89", "sm_90"}
    for names in metrics.values():
        assert len(set(names)) == len(names)
        assert VALUES.keys() <= set(names)


IDLE = Counters(5, 1e-6, 1.0, 1.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.4, 0.1, {"barrier": 0.7})
USE = KernelUse("k", 264, 512, 0, KernelResources(64, 0, 0, 0, 0), Occupancy(2, 32, 0.5, ("registers",)))


@pytest.mark.parametrize(
    ("counters", "use", "limit"),
    [
        (replace(IDLE, memory_share=0.61, l2_share=0.6), USE, "memory"),
        (replace(IDLE, memory_share=0.61, l2_share=0.9), USE, "L2"),
        (replace(IDLE, memory_share=None, compute_share=0.8), USE, "multiprocessors"),
        (replace(IDLE, memory_share=0.7), replace(USE, num_blocks=1), "memory"),
        (IDLE, replace(USE, num_blocks=66), "blocks"),
        (IDLE, replace(USE, num_blocks=67), "latency"),
        (replace(IDLE, occupancy=0.2), USE, "occupancy"),
        (replace(IDLE, occupancy=0.31), USE, "latency"),
        (replace(IDLE, occupancy=0.0), None, "latency"),
        (replace(IDLE, stalls={}), USE, "unknown"),
        (replace(IDLE, stalls={"not_selected": 0.9}), USE, "unknown"),
        (replace(IDLE, stalls={"not_selected": 0.9, "wait": 0.1}), USE, "latency"),
        (replace(IDLE, memory_share=None, l2_share=None, compute_share=None), USE, "unknown"),
    ],
)
def test_what_limits_a_kernel(counters: Counters, use: KernelUse | None, limit: str) -> None:
    assert find_limit(counters, use, 132) == limit
