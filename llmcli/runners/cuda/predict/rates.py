"""Measures a card's rates of reading memory and of large products, and the host's time for a launch.

It takes about a second. Nothing stays allocated.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from llmcli.errors import InsufficientMemoryError
from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.elementwise import add_parts
from llmcli.kernels.read_bandwidth import SPEC, num_blocks, read_bandwidth
from llmcli.kernels.tiles import ALIGNMENT
from llmcli.runners.cuda.plan.regions import ARRAY_DTYPES
from llmcli.runners.cuda.predict.predictor import Rates
from llmcli.runners.cuda.step.arena import allocate, free_bytes, send

_MOST_READ_BYTES = 4 * 2**30
_LEAST_L2_SIZES = 4  # read at least this many times the L2 cache, or memory would look faster than it is
# A rate is the median of _REPEATS runs, each of _CALLS_PER_REPEAT calls in a row.
_REPEATS = 7
_CALLS_PER_REPEAT = 8
# Work before measuring. Bandwidth settles after 10 ms: one H200 read 4,030 to 4,430 GB/s before, depending on the
# process, and 4,460 to 4,540 GB/s after. Matrix products slow by a fifth when they reach the power limit; a prompt is
# too short for that, so they are measured cold.
_READ_WARM_SECONDS, _MATMUL_WARM_SECONDS = 0.2, 0.0
# The measured product: a prompt's chunk times a matrix of a 7B model.
_NUM_TOKENS, _NUM_ROWS, _NUM_INPUTS = 2048, 8192, 4096
_CODE_DEVIATION = 32  # of int8 values, about as in a weight's group
# A run of launches: _STARTS times _KERNELS kernels. The arrays are so small that the host never waits for the card.
_STARTS, _KERNELS = 50, 4
_SMALL = 16


def measure_rates(device: Device, types: Iterable[str]) -> Rates:
    """Measure reading, products of each of `types` (named as in config.json), and launches.

    Raises: InsufficientMemoryError on a card that is full already; DeviceError
    """
    read_bytes = measure_read_bytes(device)
    return Rates(read_bytes, {kind: measure_flops(device, kind) for kind in types}, measure_launch_seconds(device))


def measure_read_bytes(device: Device) -> float:
    """Measure the bytes a second that the card reads when it does nothing else; the median of several runs.

    Raises: as `measure_rates`
    """
    num_bytes = min(_MOST_READ_BYTES, free_bytes() // 2) // ALIGNMENT * ALIGNMENT
    if num_bytes < _LEAST_L2_SIZES * device.l2_bytes:
        raise InsufficientMemoryError(
            f"the card has {free_bytes() / 2**30:.2f} GiB free, too little to measure its bandwidth; "
            "stop other programs that use it"
        )
    device.prepare(SPEC.stem, SPEC.variants)
    memory, sums = _array((num_bytes,), "uint8"), _array((num_blocks(device),), "uint32")
    work = functools.partial(read_bandwidth, device, memory=memory, sums=sums)
    return num_bytes / _median_seconds(device, work, _READ_WARM_SECONDS)


def measure_flops(device: Device, kind: str) -> float:
    """Measure the operations a second of a large product of the matrix library; `int8` has int32 sums.

    Raises: as `measure_rates`
    """
    is_whole = kind == "int8"
    dtype = np.dtype(np.int8) if is_whole else ARRAY_DTYPES[kind]
    out = _array((_NUM_TOKENS, _NUM_ROWS), "int32" if is_whole else "float32")
    x, weight = _array((_NUM_TOKENS, _NUM_INPUTS), dtype), _array((_NUM_ROWS, _NUM_INPUTS), dtype)
    # Not zeros: they cost less power than weights, and would run faster.
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    if is_whole:
        stored = np.clip(np.rint(values * _CODE_DEVIATION), -127, 127).astype(np.int8)
    else:
        stored = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else values.astype(dtype)
    for target in (x, weight):
        for part in target.reshape(-1, len(stored)):
            send(device, part, stored)
    work = functools.partial(Cublas(device).matmul, x=x, weight=weight, out=out)
    seconds = _median_seconds(device, work, _MATMUL_WARM_SECONDS)
    return 2 * _NUM_TOKENS * _NUM_ROWS * _NUM_INPUTS / seconds


def measure_launch_seconds(device: Device) -> float:
    """Measure the host's seconds to replay a launch of a kernel of ours.

    Raises: as `measure_rates`
    """

    def run() -> None:
        for _ in range(_KERNELS):
            add_parts(device, parts=parts, out=out)

    parts, out = _array((1, _SMALL, _SMALL), "float32"), _array((_SMALL, _SMALL), "float32")
    times: list[float] = []
    with device_errors():
        replay = device.record(run, ())
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            for _ in range(_STARTS):
                replay.start(())
            times.append((time.perf_counter() - begin) / (_STARTS * _KERNELS))
            device.synchronize()
    return statistics.median(times)


def _array(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return cupy.ndarray(shape, dtype, allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize))


def _median_seconds(device: Device, work: Callable[[], None], warm_seconds: float) -> float:
    """Median seconds of one call of `work`, timed by events, after `warm_seconds` of the same work."""
    times: list[float] = []
    worked = 0.0
    with device_errors():
        work()  # the first call loads what it needs, while the card is idle
        device.synchronize()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        while len(times) < _REPEATS:
            begin.record(device.stream)
            for _ in range(_CALLS_PER_REPEAT):
                work()
            end.record(device.stream)
            end.synchronize()
            seconds = float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3
            if worked >= warm_seconds:
                times.append(seconds / _CALLS_PER_REPEAT)
            worked += seconds
    return statistics.median(times)
