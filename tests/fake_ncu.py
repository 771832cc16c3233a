"""A stand-in for Nsight Compute: it prints the output of ncu 2025.3, and its errors."""

import json
import stat
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, signal, subprocess, sys, time

arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([os.environ.get("LC_ALL"), *arguments]) + "\\n")
metrics = arguments[arguments.index("--metrics") + 1].split(",")
units, values, unknown, does = json.loads({settings!r})
print("==PROF== Connected to process 4711 (/usr/bin/python3.11)")
print("a line of the program's own")
if does == "permission":
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on "
          "the target device 0. For instructions on enabling permissions and to get more information see "
          "https://developer.nvidia.com/ERR_NVGPUCTRPERM")
    print("==PROF== Disconnected from process 4711")
    print("==WARNING== No kernels were profiled.")
    sys.exit(0)
if does == "crash":
    print("error: the card's memory is full (\\x1b[31mout of memory)", file=sys.stderr)
    print("==PROF== Disconnected from process 4711")
    print("==ERROR== The application returned an error code (1).")
    sys.exit(1)
if does == "garbage":
    sys.stdout.buffer.write(b"\\xff\\x00\\"ID\\",\\nID\\n\\"ID,,,\\n" * 20)
    sys.exit(0)
if does == "nothing":
    print("==WARNING== No kernels were profiled.")
    sys.exit(0)
if does == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if does == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({log!r} + ".child", "w") as file:
        file.write(f"{{child.pid}}\\n")
    time.sleep(600)
asked = [metric for metric in metrics if metric in unknown]
if asked:
    for metric in asked:
        name = metric if does != "regex" else "regex:^" + metric.partition(".")[0] + "\\\\.(sum|min|max|avg|pct|ratio)$"
        print(f"==ERROR== Failed to find metric {{name}}")
    print("==ERROR== Failed to create the profiler.")
    sys.exit(9)
for number in range(3):
    print(f'==PROF== Profiling "gemv" - {{number}}: 0%....50%....100% - 9 passes')
print("==PROF== Disconnected from process 4711")
head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size"]
head += ["Device", "CC"]

def line(cells):
    print(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))

line([*head, *metrics])
line([*("" for _ in head), *(units.get(metric, "") for metric in metrics)])
for number in range(3):
    about = [str(number), "4711", "python3.11", "127.0.0.1", 'void gemv<Int8, 128>(T1, "x", T2)', "1", "7"]
    about += ["(512, 1, 1)", "(132, 1, 1)", "0", "9.0"]
    line([*about, *(values.get(metric, ["n/a"] * 3)[number] for metric in metrics)])
"""

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Values of a kernel that streams weights, as `--print-units base` shows them: the three launches differ.
VALUES = {
    "gpu__time_duration.sum": ["9,600", "9,312", "9,216"],
    "dram__bytes_read.sum": ["34,100,224", "34,099,968", "34,105,344"],
    "dram__bytes_write.sum": ["16,384", "0", "32"],
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ["77.10", "78.20", "78.90"],
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ["31.00", "31.50", "31.20"],
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ["40.10", "40.20", "40.30"],
    "l1tex__t_sector_hit_rate.pct": ["1.25", "1.25", "1.50"],
    "lts__t_sector_hit_rate.pct": ["3.10", "3.00", "2.90"],
    "sm__warps_active.avg.pct_of_peak_sustained_active": ["24.10", "24.20", "24.30"],
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ["18.00", "19.00", "20.00"],
    STALL.format("long_scoreboard"): ["6.0", "6.0", "6.0"],
    STALL.format("barrier"): ["2.0", "2.0", "2.0"],
    STALL.format("wait"): ["1.0", "1.0", "1.0"],
    STALL.format("selected"): ["1.0", "1.0", "1.0"],
}
UNITS = dict.fromkeys(VALUES, "%") | {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    **{metric: "inst" for metric in VALUES if metric.startswith("smsp__average")},
}
# The same in ncu's default form, and with the units of older versions.
AUTO_VALUES = VALUES | {
    "gpu__time_duration.sum": ["9.60", "9.312", "9.216"],
    "dram__bytes_read.sum": ["34.100224", "34.099968", "34.105344"],
    "dram__bytes_write.sum": ["16.384", "0", "0.032"],
}
AUTO_UNITS = UNITS | {
    "gpu__time_duration.sum": "usecond",
    "dram__bytes_read.sum": "Mbyte",
    "dram__bytes_write.sum": "Kbyte",
}


class FakeNcu:
    """The program at `path`; `calls` are the value of LC_ALL and the arguments of each time it ran."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "ncu", folder / "calls"
        self.write()

    def write(
        self,
        does: str = "",
        values: dict[str, list[str]] | None = None,
        units: dict[str, str] | None = None,
        unknown: tuple[str, ...] = (),
    ) -> None:
        """Set what it does from now on."""
        settings = json.dumps([UNITS if units is None else units, VALUES if values is None else values, unknown, does])
        text = PROGRAM.format(python=sys.executable, log=str(self.log), settings=settings)
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
