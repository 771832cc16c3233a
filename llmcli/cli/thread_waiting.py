"""How torch's threads wait for each other. OpenMP reads it from the environment when torch is imported."""

import os
import time
from pathlib import Path

_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOAD = Path("/proc/loadavg")
# Rounds of waiting before a thread sleeps, 0.1 ms: the next work is there by then, and to be woken takes as long. By
# itself OpenMP waits for milliseconds. Three programs on two cores then take ten times as long as one by one.
_ROUNDS = 10_000
_SAMPLES, _PAUSE_SECONDS = 8, 0.001


def choose_waiting(num_threads: int | None) -> None:
    """Let waiting threads sleep at once if other programs need the cores; else after a moment.

    What a user has set stays. `num_threads` are those that will compute; None for one a core.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    num_cores = os.cpu_count() or 1
    is_crowded = _num_running() + (num_threads or num_cores) > num_cores
    os.environ["GOMP_SPINCOUNT"] = "0" if is_crowded else str(_ROUNDS)


def _num_running() -> int:
    """Other threads of this machine that compute now, in the middle of some samples; 0 where nothing tells."""
    samples = []
    for _ in range(_SAMPLES):
        try:
            samples.append(int(_LOAD.read_text().split()[3].partition("/")[0]) - 1)  # this thread also runs
        except (OSError, ValueError, IndexError):
            return 0
        time.sleep(_PAUSE_SECONDS)
    return sorted(samples)[_SAMPLES // 2]
