"""What Nsight Compute counts of a kernel: the metrics to ask for, and its CSV read into figures.

Source: Nsight Compute, Kernel Profiling Guide, "Metrics Reference"; the sections SpeedOfLight, SchedulerStatistics and
WarpStateStatistics that it ships name the same metrics.
"""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
# States that only some architectures have: the first and the last compute capability, as the profiler's sections say.
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
    """Medians over launches of a kernel. A figure is None where the profiler does not have it for this card.

    `seconds` is the time of a launch; bytes are those of memory, not of caches. Shares are of 1: of the most that
    memory, the L2 cache and the busiest unit of the multiprocessors can do; of what was asked of L1 and L2; of
    the warps that multiprocessors could hold (`occupancy`) and of the cycles in which they issue. `stalls` is how warps
    spend their time when they do not issue, as shares of all of it, the largest first.
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
    """The launches in what `ncu --csv --page raw` writes: a line of names, one of units, and one for each launch.

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
    """The medians over launches, of which there is at least one."""
    figures = {field: _median(launches, metric) for field, metric in _METRICS.items()}
    # Warps in each state for an instruction that is issued: their sum is the time that it took.
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
            value = float(text.replace(",", ""))  # of thousands: the profiler runs in the locale C
        except ValueError:  # "n/a"
            return None
        if scale is None or not math.isfinite(value):
            return None
        values.append(value * scale)
    return statistics.median(values)
