"""How long this process has been running, which Python itself does not know."""

import os
import time
from pathlib import Path

_START_TIME = 19  # the field `starttime` of /proc/self/stat, counted after the command's name


def process_age() -> float:
    """Seconds since this process was started.

    Linux knows that to a hundredth of a second. Elsewhere it is the time the process has spent computing, which is
    nearly all it does while it starts.
    """
    computing = time.process_time()
    try:
        # The name, in parentheses, may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, computing)
    except (OSError, AttributeError, ValueError, IndexError):
        return computing
