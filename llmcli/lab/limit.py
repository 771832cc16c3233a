"""Names what limits a kernel from what was counted of it."""

from typing import Literal

from llmcli.lab.counters import Counters
from llmcli.lab.walk import KernelUse

Limit = Literal["memory", "L2", "multiprocessors", "blocks", "occupancy", "latency", "unknown"]

BUSY = 0.6  # of a peak; Nsight Compute's own rule calls less than this a kernel that waits
_FEW = 0.5  # blocks for a multiprocessor
_LOW = 0.6  # of the warps that could be there


def find_limit(counters: Counters, use: KernelUse | None, num_multiprocessors: int) -> Limit:
    """The busiest of memory, L2 and multiprocessors; else what keeps all of them waiting.

    That is too few blocks, fewer warps than there could be, or latency, which the largest stall names.
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
