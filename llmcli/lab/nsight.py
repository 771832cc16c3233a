"""Nsight Compute: runs its command line, reads a kernel's counters, and names what limits the kernel."""

import csv
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmcli.errors import DeviceError
from llmcli.lab.walk import KernelUse

# The counters of Nsight Compute: the metrics to ask for, and its CSV read into figures.
#
# Source: Nsight Compute, Kernel Profiling Guide, "Metrics Reference"; its sections SpeedOfLight, SchedulerStatistics
# and WarpStateStatistics name the same metrics.

# Field of `Counters` -> metric.
_METRICS = {
    "seconds": "gpu__time_duration.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "memory_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "compute_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_hit_share": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_share": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_share": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
_SELECTED = "selected"  # no stall: the warp issues
_NOT_SELECTED = "not_selected"  # nothing to wait for: another warp issues
_STATES = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    _NOT_SELECTED,
    _SELECTED,
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
# States that only some architectures have: the first and the last compute capability, from the profiler's sections.
_STATES_WITHIN = {"gmma": (90, 90), "imc_miss": (80, 90)}
_UNITS = {
    "%": 1e-2,
    **{f"{prefix}byte": scale for prefix, scale in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}second": scale for prefix, scale in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))},
    **{f"{prefix}s": scale for prefix, scale in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))},
}
_FIRST_COLUMN = "ID"

Launched = Mapping[str, tuple[str, str]]  # value and unit of each metric, as the profiler writes them


@dataclass(frozen=True)
class Counters:
    """Medians over launches of a kernel. A figure is None if the profiler does not have it for this card.

    `seconds` is the time of a launch; bytes are those of memory, not of caches. Shares are at most 1: shares of the
    peak of memory, of the L2 cache and of the busiest unit of the multiprocessors; hits of L1 and of L2; the share of
    the warps that multiprocessors could hold (`occupancy`), and of the cycles in which they issue. `stalls` are the
    states of warps that do not issue, as shares of all their time, the largest first.
    """

    num_launches: int
    seconds: float | None
    read_bytes: float | None
    written_bytes: float | None
    memory_share: float | None
    l2_share: float | None
    compute_share: float | None
    l1_hit_share: float | None
    l2_hit_share: float | None
    occupancy: float | None
    issue_share: float | None
    stalls: Mapping[str, float]

    @property
    def num_bytes(self) -> float | None:
        """Bytes that a launch reads from memory and writes to it."""
        if self.read_bytes is None or self.written_bytes is None:
            return None
        return self.read_bytes + self.written_bytes

    @property
    def largest_stall(self) -> tuple[str, float] | None:
        """What warps wait for most, and its share of their time."""
        return next(((state, share) for state, share in self.stalls.items() if state != _NOT_SELECTED), None)


def metrics_for(arch: str) -> list[str]:
    """The metrics to ask for on an architecture such as `sm_90`."""
    capability = int(arch.removeprefix("sm_"))
    others = (state for state, (first, last) in _STATES_WITHIN.items() if first <= capability <= last)
    return [*_METRICS.values(), *(_metric_of(state) for state in (*_STATES, *others))]


def read_launches(text: str) -> list[Launched]:
    """Read the launches that `ncu --csv --page raw` writes: a line of names, one of units, and one for each launch.

    Other lines, of the profiler and of the program, are left out. Without a table there are no launches.
    """
    rows = list(csv.reader(text.splitlines()))
    begin = next((number for number, row in enumerate(rows) if row and row[0] == _FIRST_COLUMN), None)
    if begin is None or len(rows) < begin + 2:
        return []
    names, units = rows[begin], rows[begin + 1]
    return [
        dict(zip(names, zip(row, units, strict=False), strict=False))
        for row in rows[begin + 2 :]
        if len(row) == len(names) and row[0].isdecimal()
    ]


def counters_of(launches: Sequence[Launched]) -> Counters:
    """The medians over launches; there must be at least one."""
    figures = {field: _median(launches, metric) for field, metric in _METRICS.items()}
    # Warps in each state for each issued instruction: their sum is the time that it took.
    states = {
        state: warps
        for state in (*_STATES, *_STATES_WITHIN)
        if (warps := _median(launches, _metric_of(state), has_unit=False)) is not None
    }
    total = sum(states.values())
    stalls = sorted(states.items(), key=lambda one: -one[1]) if total > 0 else []
    return Counters(
        num_launches=len(launches),
        **figures,
        stalls={state: warps / total for state, warps in stalls if state != _SELECTED},
    )


def _metric_of(state: str) -> str:
    return f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio"


def _median(launches: Sequence[Launched], metric: str, *, has_unit: bool = True) -> float | None:
    """In base units; None if a launch lacks it."""
    values = []
    for launch in launches:
        text, unit = launch.get(metric, ("", ""))
        scale = _UNITS.get(unit) if has_unit else 1.0
        try:
            value = float(text.replace(",", ""))  # between thousands: the profiler runs in the locale C
        except ValueError:  # "n/a"
            return None
        if scale is None or not math.isfinite(value):
            return None
        values.append(value * scale)
    return statistics.median(values)


# Nsight Compute's command line, `ncu`: where it is, how it runs a program of ours, and why it fails.

_NAME = "ncu"
# Where the installers of NVIDIA and of Linux distributions put it, below the root.
_ROOT = Path("/")
_FOLDERS = ("usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*", "usr/local/NVIDIA-Nsight-Compute*")
_OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base"),
    *("--target-processes", "all"),  # on Windows a virtual environment's python starts another
    *("--profile-from-start", "off"),  # the program marks the launches to profile
    *("--clock-control", "none"),  # the clocks of a real run; setting them would need a right
    *("--cache-control", "all"),  # empty caches: each launch is repeated for every few metrics, and would find its data
)
_UNKNOWN_METRIC = re.compile(r"Failed to find metric (.+)")  # a name, or regex:^NAME\.(sum|min|...)$
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_LAST_LINES = 3
_NOISE = "==PROF=="

HOW_TO_GET = (
    "Nsight Compute (ncu) is not installed; it comes with the CUDA toolkit, or alone from "
    "https://developer.nvidia.com/nsight-compute (with NVIDIA's apt repository: apt install cuda-nsight-compute-13-0). "
    "llmcli kernels bench needs no profiler"
)
HOW_TO_PERMIT = (
    f"the NVIDIA driver keeps its performance counters from this user ({_NO_PERMISSION}); run the command with sudo, "
    "start a container with --cap-add=SYS_ADMIN, or write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to "
    "/etc/modprobe.d/nvidia-counters.conf and restart the machine"
)


def find_ncu() -> Path:
    """Find the profiler: on PATH, in $CUDA_HOME, or the newest in the folders of its installers.

    Raises: DeviceError saying how to get it
    """
    home = os.environ.get("CUDA_HOME")
    first = shutil.which(_NAME), home and shutil.which(_NAME, path=str(Path(home) / "bin"))
    installed = [path for folder in _FOLDERS for path in sorted(_ROOT.glob(folder), key=_version, reverse=True)]
    for found in (*first, *(shutil.which(_NAME, path=str(folder)) for folder in installed)):
        if found:
            return Path(found)
    raise DeviceError(HOW_TO_GET)


def count(ncu: Path, program: Sequence[str], arch: str) -> Counters:
    """Run a program under the profiler, and return its counters for the launches that the program marks.

    Metrics that this profiler does not know are left out.
    Raises: DeviceError
    """
    metrics = metrics_for(arch)
    while True:
        exit_code, output = _run([str(ncu), *_OPTIONS, "--metrics", ",".join(metrics), *program])
        if _NO_PERMISSION in output:
            raise DeviceError(HOW_TO_PERMIT)
        launches = read_launches(output)
        if launches and exit_code == 0:
            return counters_of(launches)
        unknown = _unknown_metrics(output, metrics)
        if not unknown or len(unknown) == len(metrics):
            raise DeviceError(_failure(ncu, exit_code, output))
        metrics = [metric for metric in metrics if metric not in unknown]


def _unknown_metrics(output: str, metrics: Sequence[str]) -> set[str]:
    """The metrics that the profiler reports as unknown, named with or without what follows the first point."""
    lines = _UNKNOWN_METRIC.findall(output)
    words = {word.rstrip(".") for line in lines for word in re.findall(r"[\w.]+", line)}
    return {metric for metric in metrics if not words.isdisjoint((metric, metric.partition(".")[0]))}


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and all output. A Ctrl-C ends the profiler and its program.

    Raises: DeviceError if it does not start
    """
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "LC_ALL": "C"},  # numbers with a point
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group, so that the program ends with the profiler
        )
    except OSError as error:
        raise DeviceError(f"{command[0]} does not start: {error.strerror}") from error
    with process:
        try:
            output, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
    return process.returncode, output.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
    elif process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _failure(ncu: Path, exit_code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith(_NOISE)]
    said = "; ".join(lines[-_LAST_LINES:]) or "it wrote nothing"
    if exit_code < 0:
        return f"{ncu} was ended by signal {-exit_code}: {said}"
    if exit_code > 0:
        return f"{ncu} failed with exit code {exit_code}: {said}"
    return f"{ncu} counted nothing: {said}"


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]


# Names what limits a kernel, from its counters.

Limit = Literal["memory", "L2", "multiprocessors", "blocks", "occupancy", "latency", "unknown"]

BUSY = 0.6  # of a peak; Nsight Compute's own rule calls less than this a kernel that waits
_FEW = 0.5  # blocks for a multiprocessor
_LOW = 0.6  # of the warps that could be there


def find_limit(counters: Counters, use: KernelUse | None, num_multiprocessors: int) -> Limit:
    """The busiest of memory, L2 and multiprocessors; else what makes all of them wait.

    That is too few blocks, too few warps, or latency, named by the largest stall.
    """
    peaks: tuple[tuple[Limit, float | None], ...] = (
        ("memory", counters.memory_share),
        ("L2", counters.l2_share),
        ("multiprocessors", counters.compute_share),
    )
    shares = {name: share for name, share in peaks if share is not None}
    if not shares:
        return "unknown"
    busiest = max(shares, key=lambda name: shares[name])
    if shares[busiest] >= BUSY:
        return busiest
    if use is not None and use.num_blocks <= _FEW * num_multiprocessors:
        return "blocks"
    if use is not None and counters.occupancy is not None and counters.occupancy < _LOW * use.occupancy.share:
        return "occupancy"
    return "latency" if counters.largest_stall else "unknown"
