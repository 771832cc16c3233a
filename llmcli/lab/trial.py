"""Runs kernels on a card for the lab: outputs between canaries, then times over rotating copies of the arrays.

Launches are timed inside a CUDA graph, without the host; or by stream, each started by the host.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcli.errors import DeviceError
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.replay import base_addresses
from llmcli.lab.problem import Arrays, Output, Problem, find_mismatch, largest_error

FENCE_BYTES = 512  # on each side of an output; a multiple of every vector's width
_CANARY = 0xA5
_POISON = 0xFF  # NaN in every floating-point type, -1 in whole numbers
_RING_BYTES = 400 * 10**6  # several times the L2 of any card
_MAX_COPIES = 64  # more copies only cost memory: an array this small is in L2 in a real model, too
_GRAPH_SECONDS = 2e-3
MAX_LAUNCHES = 400  # of a graph

Start = Callable[[Arrays], None]  # starts all launches that solve a problem


@dataclass(frozen=True)
class Times:
    """How long solving a problem takes. Units: seconds"""

    median: float
    fastest: float


@dataclass(frozen=True)
class Judgement:
    """The result for a problem: the largest error as a share of its bound, and what is wrong, empty if nothing is."""

    largest: float
    fault: str = ""


def run_once(device: Device, problem: Problem, start: Start) -> dict[str, np.ndarray]:
    """Solve a problem once, and return its outputs.

    Raises: DeviceError for a kernel that fails, or that writes next to its outputs
    """
    run = _run(device, problem, start)
    if run.beside:
        raise DeviceError(run.beside)
    return run.results


def judge(device: Device, problem: Problem, start: Start) -> Judgement:
    """Solve a problem twice, and check everything that must hold.

    Outputs are within their bounds and have the same bits both times, nothing next to them is written, and inputs do
    not change.
    Raises: DeviceError for a kernel that fails
    """
    first, second = (_run(device, problem, start) for _ in range(2))
    mismatch = find_mismatch(problem, first.results)
    faults = [str(mismatch)] if mismatch is not None else []
    faults += [fault for fault in (first.beside, first.changed) if fault]
    differing = [name for name, array in first.results.items() if array.tobytes() != second.results[name].tobytes()]
    if differing:
        faults.append(f"two runs give {', '.join(differing)} different bits")
    return Judgement(math.inf if faults else largest_error(problem, first.results), "; ".join(faults))


def measure(
    device: Device,
    problem: Problem,
    starts: Mapping[str, Start],
    num_rounds: int = 7,
    by_stream: Collection[str] = (),
) -> dict[str, Times]:
    """Time several ways to solve a problem; rounds alternate between them. Raises: DeviceError"""
    with device.stream, device_errors():
        copies = _copies(problem)
        ways = {name: [partial(start, one) for one in copies] for name, start in starts.items()}
        runs = {
            name: _record(device, starts[name], copies) if name in by_stream else _capture(device, ways[name])
            for name in starts
        }
        times: dict[str, list[float]] = {name: [] for name in starts}
        for _ in range(num_rounds):
            for name, (run, count) in runs.items():
                times[name].append(_seconds(device, run) / count)
        return {name: Times(statistics.median(seconds), min(seconds)) for name, seconds in times.items()}


def time_launches(
    device: Device, starts: Sequence[Callable[[], None]], most: int = MAX_LAUNCHES, num_rounds: int = 7
) -> Times:
    """The time of one of these launches; they take turns. A graph holds `most` of them, or all if they are fewer.

    In all 3 + (1 + num_rounds) * the launches of a graph are made.
    Raises: DeviceError
    """
    with device.stream, device_errors():
        run, count = _capture(device, starts, most)
        seconds = [_seconds(device, run) / count for _ in range(num_rounds)]
        return Times(statistics.median(seconds), min(seconds))


def run_marked(device: Device, starts: Sequence[Callable[[], None]], count: int) -> None:
    """Make one of these launches, which compiles, then `count` in turn, marked for a waiting profiler.

    Raises: DeviceError
    """
    from cupy.cuda import runtime

    with device.stream, device_errors():
        starts[0]()
        device.synchronize()
        runtime.profilerStart()
        for number in range(count):
            starts[number % len(starts)]()
        device.synchronize()
        runtime.profilerStop()


def upload_copies(device: Device, problem: Problem) -> Sequence[Arrays]:
    """Copy all arrays of a problem until they do not fit in L2 together, up to a limit. Raises: DeviceError"""
    with device.stream, device_errors():
        copies = _copies(problem)
        device.synchronize()
    return copies


def release_memory() -> None:
    """Free the card's memory of arrays without a reference: CuPy keeps it, and plans count what is free."""
    import cupy

    with device_errors():
        cupy.get_default_memory_pool().free_all_blocks()


@dataclass(frozen=True)
class _Run:
    """Outputs; a sentence on bytes written next to them, and one on changed inputs, each empty if there are none."""

    results: dict[str, np.ndarray]
    beside: str
    changed: str


def _run(device: Device, problem: Problem, start: Start) -> _Run:
    with device.stream, device_errors():
        inputs = _upload(problem)
        outputs = {**problem.outputs, **problem.scratch}
        fences = {name: _fenced(output, inputs) for name, output in outputs.items()}
        device.synchronize()  # some kernels read weights before the previous work has ended
        start({**inputs, **{name: array for name, (array, _) in fences.items()}})
        device.synchronize()
        written = {name: _bytes_beside(array, memory) for name, (array, memory) in fences.items()}
        beside = [f"{count} bytes beside {name} were overwritten" for name, count in written.items() if count]
        changed = [name for name, array in inputs.items() if array.get().tobytes() != problem.inputs[name].tobytes()]
        results = {name: fences[name][0].get() for name in problem.outputs}
    return _Run(results, "; ".join(beside), f"{', '.join(changed)} changed" if changed else "")


def _upload(problem: Problem) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(array) for name, array in problem.inputs.items()}


def _fenced(output: Output, inputs: Arrays) -> tuple[Any, Any]:
    """An output full of NaN, or of its first values, and the memory around it."""
    import cupy

    dtype = np.dtype(output.dtype)
    size = int(np.prod(output.shape)) * dtype.itemsize
    memory = cupy.full(size + 2 * FENCE_BYTES, _CANARY, dtype=np.uint8)
    inside = memory[FENCE_BYTES : FENCE_BYTES + size]
    inside[...] = 0 if output.holds_zeros else _POISON
    array = inside.view(dtype).reshape(output.shape)
    if output.initial:
        array[...] = inputs[output.initial]
    return array, memory


def _bytes_beside(array: Any, memory: Any) -> int:
    """Bytes of the fences that changed."""
    end = FENCE_BYTES + array.nbytes
    return int((memory[:FENCE_BYTES] != _CANARY).sum() + (memory[end:] != _CANARY).sum())


def _copies(problem: Problem) -> list[dict[str, Any]]:
    """Copies of all arrays until they do not fit in L2 together, up to a limit."""
    import cupy

    outputs = {**problem.outputs, **problem.scratch}
    inputs = _upload(problem)
    first = inputs | {name: cupy.zeros(one.shape, one.dtype) for name, one in outputs.items()}
    for name, one in outputs.items():
        if one.initial:
            first[name][...] = inputs[one.initial]
    count = max(2, min(_MAX_COPIES, -(-_RING_BYTES // sum(array.nbytes for array in first.values()))))
    return [first, *({name: array.copy() for name, array in first.items()} for _ in range(count - 1))]


def _capture(
    device: Device, starts: Sequence[Callable[[], None]], most: int = MAX_LAUNCHES
) -> tuple[Callable[[], None], int]:
    """A graph of enough starts in turn for a clock to measure, and their number."""
    count = _count(device, starts, most)
    device.stream.begin_capture()
    for number in range(count):
        starts[number % len(starts)]()
    graph = device.stream.end_capture()
    run = partial(graph.launch, device.stream)
    _seconds(device, run)
    return run, count


def _record(device: Device, start: Start, copies: Sequence[Arrays]) -> tuple[Callable[[], None], int]:
    """Enough starts for a clock to measure, each by the host as the engine does outside of graphs, and their number."""
    count = _count(device, [partial(start, one) for one in copies], MAX_LAUNCHES)
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


def _count(device: Device, starts: Sequence[Callable[[], None]], most: int) -> int:
    """Start one to three times, which compiles and shows whether it runs at all; return how often to repeat it."""
    starts[0]()
    begin, few = device.now(), starts[:2]
    for start in few:
        start()
    once = max(begin.seconds_until(device.now()) / len(few), 1e-6)
    return max(len(starts), min(most, int(_GRAPH_SECONDS / once)))


def _seconds(device: Device, run: Callable[[], None]) -> float:
    """The time of one run."""
    begin = device.now()
    run()
    return begin.seconds_until(device.now())
