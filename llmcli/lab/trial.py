"""Runs kernels on a card for the lab: outputs between canaries, then times over rotating copies of the arrays.

Launches are timed inside a CUDA graph, where no host is in the way; or by stream, each started by the host.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.replay import base_addresses
from llmcli.lab.problem import Arrays, Output, Problem

FENCE_BYTES = 512  # on each side of an output; a multiple of every vector's width
_CANARY = 0xA5
_POISON = 0xFF  # NaN in every floating-point type, -1 in whole numbers
_RING_BYTES = 400 * 10**6  # several times the L2 of any card
_MAX_COPIES = 64  # beyond it copies only cost memory: so small an array is in L2 in a real model, too
_GRAPH_SECONDS = 2e-3
_MAX_LAUNCHES = 400

Start = Callable[[Arrays], None]  # starts all launches that solve a problem


@dataclass(frozen=True)
class Times:
    """How long solving a problem takes. Units: seconds"""

    median: float
    fastest: float


def run_once(device: Device, problem: Problem, start: Start) -> dict[str, np.ndarray]:
    """Solve a problem once, and return its outputs.

    Raises: DeviceError for a kernel that fails, or that writes beside its outputs
    """
    with device.stream, device_errors():
        fences = {name: _fenced(output) for name, output in {**problem.outputs, **problem.scratch}.items()}
        start({**_upload(problem), **{name: array for name, (array, _) in fences.items()}})
        device.synchronize()
        for name, (array, memory) in fences.items():
            if written := _bytes_beside(array, memory):
                raise DeviceError(f"{written} bytes beside {name} were overwritten")
        return {name: fences[name][0].get() for name in problem.outputs}


def measure(
    device: Device,
    problem: Problem,
    starts: Mapping[str, Start],
    num_rounds: int = 7,
    by_stream: Collection[str] = (),
) -> dict[str, Times]:
    """The times of several ways to solve a problem; rounds alternate between them.

    Raises: DeviceError
    """
    with device.stream, device_errors():
        copies = _copies(problem)
        runs = {
            name: (_record if name in by_stream else _capture)(device, start, copies) for name, start in starts.items()
        }
        times: dict[str, list[float]] = {name: [] for name in starts}
        for _ in range(num_rounds):
            for name, (run, count) in runs.items():
                times[name].append(_seconds(device, run) / count)
        return {name: Times(statistics.median(seconds), min(seconds)) for name, seconds in times.items()}


def _upload(problem: Problem) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(array) for name, array in problem.inputs.items()}


def _fenced(output: Output) -> tuple[Any, Any]:
    """An output full of NaN, and the memory around it."""
    import cupy

    dtype = np.dtype(output.dtype)
    size = int(np.prod(output.shape)) * dtype.itemsize
    memory = cupy.full(size + 2 * FENCE_BYTES, _CANARY, dtype=np.uint8)
    inside = memory[FENCE_BYTES : FENCE_BYTES + size]
    inside[...] = 0 if output.holds_zeros else _POISON
    return inside.view(dtype).reshape(output.shape), memory


def _bytes_beside(array: Any, memory: Any) -> int:
    """Bytes of the fences that changed."""
    end = FENCE_BYTES + array.nbytes
    return int((memory[:FENCE_BYTES] != _CANARY).sum() + (memory[end:] != _CANARY).sum())


def _copies(problem: Problem) -> list[dict[str, Any]]:
    """Enough copies of all arrays that they do not fit in L2 together, as far as that makes sense."""
    import cupy

    outputs = {**problem.outputs, **problem.scratch}
    first = _upload(problem) | {name: cupy.zeros(one.shape, one.dtype) for name, one in outputs.items()}
    count = max(2, min(_MAX_COPIES, -(-_RING_BYTES // sum(array.nbytes for array in first.values()))))
    return [first, *({name: array.copy() for name, array in first.items()} for _ in range(count - 1))]


def _capture(device: Device, start: Start, copies: Sequence[Arrays]) -> tuple[Callable[[], None], int]:
    """A graph of so many solutions that a clock can measure it, and their number."""
    count = _count(device, start, copies)
    device.stream.begin_capture()
    for number in range(count):
        start(copies[number % len(copies)])
    graph = device.stream.end_capture()
    run = partial(graph.launch, device.stream)
    _seconds(device, run)
    return run, count


def _record(device: Device, start: Start, copies: Sequence[Arrays]) -> tuple[Callable[[], None], int]:
    """As many solutions, each launch started by the host as the engine does outside of graphs."""
    count = _count(device, start, copies)
    recorded = []
    for arrays in copies:
        own = list(arrays.values())
        recorded.append((device.record(partial(start, arrays), own), base_addresses(own)))

    def run() -> None:
        for number in range(count):
            replay, addresses = recorded[number % len(recorded)]
            replay.start(addresses)

    _seconds(device, run)
    return run, count


def _count(device: Device, start: Start, copies: Sequence[Arrays]) -> int:
    """Run a solution, which compiles it and finds whether it runs at all, and say how often to repeat it."""
    start(copies[0])
    begin = device.now()
    for arrays in copies[:2]:
        start(arrays)
    once = max(begin.seconds_until(device.now()) / 2, 1e-6)
    return max(len(copies), min(_MAX_LAUNCHES, int(_GRAPH_SECONDS / once)))


def _seconds(device: Device, run: Callable[[], None]) -> float:
    """The time of one run."""
    begin = device.now()
    run()
    return begin.seconds_until(device.now())
