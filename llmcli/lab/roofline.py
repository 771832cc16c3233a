"""The roofline of a card: how fast a kernel could be by its bytes and its operations, and how near it comes.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009)
"""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Point:
    """A call on the roofline. `intensity` is operations a byte; `reached` and `ceiling` are operations a second.

    Without operations (`intensity` 0) it has no place there, and only `share` of its ceiling, which its bytes set.
    """

    call: Call
    intensity: float
    reached: float
    ceiling: float
    share: float


@dataclass(frozen=True)
class Gap:
    """What a step loses against its ceilings. Units: seconds

    `least` is what the ceilings allow, `whole` what the step took. `lost` is what each kernel loses in all its
    launches, each timed beside its like, the largest first. A kernel that is faster than its ceiling, since what it
    reads lies in L2, counts as one at its ceiling.
    """

    title: str
    least: float
    whole: float
    lost: Mapping[str, float]


def place_calls(step: StepTimes, ceilings: Ceilings) -> list[Point]:
    """Each call of a step on the roofline."""
    points = []
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        least, flops = ceilings.least_seconds(call), call.cost.flops
        points.append(Point(call, flops / call.num_bytes, flops / times.median, flops / least, least / times.median))
    return points


def find_gap(step: StepTimes, ceilings: Ceilings) -> Gap:
    """Where the time goes that a step takes beyond its ceilings."""
    least, lost = 0.0, dict[str, float]()
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        bound, count = min(ceilings.least_seconds(call), times.median), len(call.places)
        least += bound * count
        lost[call.launch.stem] = lost.get(call.launch.stem, 0.0) + (times.median - bound) * count
    return Gap(step.walk.title, least, step.whole.median, dict(sorted(lost.items(), key=lambda one: -one[1])))
