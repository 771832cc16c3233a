"""Nsight Compute's command line, `ncu`: where it is, how it is run on a program of ours, and why it fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmcli.errors import DeviceError
from llmcli.lab.counters import Counters, counters_of, metrics_for, read_launches

_NAME = "ncu"
# Where the installers of NVIDIA and of Linux distributions put it, below the root.
_ROOT = Path("/")
_FOLDERS = ("usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*", "usr/local/NVIDIA-Nsight-Compute*")
_OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base"),
    *("--target-processes", "all"),  # on Windows a virtual environment's python starts another
    *("--profile-from-start", "off"),  # the program says which launches are meant
    *("--clock-control", "none"),  # the clocks of a real run, and no right to set them is needed
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
    """The profiler: that of PATH, of $CUDA_HOME, or the newest in the folders of its installers.

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
    """Run a program under the profiler, and give what it counts of the launches that the program marks.

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
    """Those that the profiler says it does not find, by their names with or without what follows the first point."""
    lines = _UNKNOWN_METRIC.findall(output)
    words = {word.rstrip(".") for line in lines for word in re.findall(r"[\w.]+", line)}
    return {metric for metric in metrics if not words.isdisjoint((metric, metric.partition(".")[0]))}


def _run(command: Sequence[str]) -> tuple[int, str]:
    """The exit code and all that was written. A Ctrl-C ends the profiler and its program.

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
