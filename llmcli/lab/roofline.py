"""The roofline of a card: how fast a kernel could be by its bytes and its operations, and how near it comes.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcli.lab.step_times import StepTimes
from llmcli.lab.walk import Call

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Ceilings:
    """What a card was measured to reach: bytes a second that it reads, operations a second of large products.

    `flops` are by the type of the factors, and hold at least float32 and float16.
    """

    read_bytes: float
    flops: Mapping[str, float]

    def flops_of(self, call: Call) -> float:
        """The rate of products for a kernel: of its floats, or of 16 bits, to which codes are widened."""
        return self.flops["float32" if call.cost.element_bits == _FLOAT_BITS else "float16"]

    def least_seconds(self, call: Call) -> float:
        """The time of a launch that reads at full speed, or multiplies at full speed, whichever takes longer."""
        return max(call.num_bytes / self.read_bytes, call.cost.flops / self.flops_of(call))

    def is_bound_by_memory(self, call: Call) -> bool:
        """Whether its bytes take longer than its operations."""
        return call.num_bytes / self.read_bytes >= call.cost.flops / self.flops_of(call)


@dataclass(frozen=True)
class Gap:
    """What a step loses against its ceilings. Units: seconds of the whole step

    `alone` is the sum of its launches, `least` what their ceilings allow; `lost` is by call, the largest first. A call
    that is faster than its ceiling, since what it reads lies in L2, loses nothing.
    """

    step: StepTimes
    alone: float
    least: float
    lost: tuple[tuple[Call, float], ...]


def find_gap(step: StepTimes, ceilings: Ceilings) -> Gap:
    """Where the time goes that a step takes beyond its ceilings."""
    least, lost = 0.0, []
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        bound = min(ceilings.least_seconds(call), times.median)
        least += bound * len(call.places)
        lost.append((call, (times.median - bound) * len(call.places)))
    return Gap(step, step.alone_seconds, least, tuple(sorted(lost, key=lambda one: -one[1])))


def by_kernel(lost: Sequence[tuple[Call, float]]) -> dict[str, float]:
    """What each kernel loses in all its calls, the largest first. Units: seconds"""
    total: dict[str, float] = {}
    for call, seconds in lost:
        total[call.launch.stem] = total.get(call.launch.stem, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda one: -one[1]))
