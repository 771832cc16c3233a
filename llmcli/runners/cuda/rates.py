"""Measures what a card reaches: reading memory, and large products of the matrix library. Takes a fraction of a second.

Nothing stays allocated.
"""

import statistics
from collections.abc import Callable, Iterable

import cupy
import numpy as np

from llmcli.errors import InsufficientMemoryError
from llmcli.kernels.cublas import WORKSPACE_BYTES, Cublas
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.read_bandwidth import SPEC, num_blocks, read_bandwidth
from llmcli.runners.cuda.arena import allocate, free_bytes, send
from llmcli.runners.cuda.predict import Rates
from llmcli.runners.cuda.regions import ALIGNMENT, ARRAY_DTYPES

_MOST_READ_BYTES = 4 * 2**30
_LEAST_L2_SIZES = 4  # read from the cache, memory would look faster than it is
_REPEATS = 7
# A prompt's chunk through a matrix of a 7B model's size.
_NUM_TOKENS, _NUM_ROWS, _NUM_INPUTS = 2048, 8192, 4096
_PRODUCTS_PER_REPEAT = 10


def measure_rates(device: Device, types: Iterable[str]) -> Rates:
    """Reading, and products of factors of each of `types`, which are named as in config.json.

    Raises: InsufficientMemoryError on a card that is full already; DeviceError
    """
    return Rates(measure_read_bytes(device), {kind: measure_flops(device, kind) for kind in types})


def measure_read_bytes(device: Device) -> float:
    """Bytes a second that the card reads when it does nothing else; the median of several runs.

    Raises: as `measure_rates`
    """
    num_bytes = min(_MOST_READ_BYTES, free_bytes() // 2) // ALIGNMENT * ALIGNMENT
    if num_bytes < _LEAST_L2_SIZES * device.l2_bytes:
        raise InsufficientMemoryError(
            f"{free_bytes() / 2**30:.2f} GiB of the card's memory are free, too little to measure its bandwidth; "
            "end what else runs on it"
        )
    device.prepare(SPEC.stem, SPEC.variants)
    memory = cupy.ndarray((num_bytes,), np.uint8, allocate(num_bytes))
    blocks = num_blocks(device)
    sums = cupy.ndarray((blocks,), np.uint32, allocate(4 * blocks))
    return num_bytes / _median_seconds(device, lambda: read_bandwidth(device, memory=memory, sums=sums))


def measure_flops(device: Device, kind: str) -> float:
    """Operations a second of a large product of the matrix library.

    Raises: as `measure_rates`
    """
    dtype = ARRAY_DTYPES[kind]
    arena = [
        cupy.ndarray(shape, item, allocate(int(np.prod(shape)) * item.itemsize))
        for shape, item in (
            ((WORKSPACE_BYTES,), np.dtype(np.uint8)),
            ((_NUM_TOKENS, _NUM_INPUTS), dtype),
            ((_NUM_ROWS, _NUM_INPUTS), dtype),
            ((_NUM_TOKENS, _NUM_ROWS), np.dtype(np.float32)),
        )
    ]
    workspace, x, weight, out = arena
    # Zeros would cost less power, and so run faster than weights do.
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else values.astype(dtype)
    for target in (x, weight):
        for part in target.reshape(-1, len(stored)):
            send(device, part, stored)
    library = Cublas(device, workspace)

    def multiply() -> None:
        for _ in range(_PRODUCTS_PER_REPEAT):
            library.matmul(x=x, weight=weight, out=out)

    seconds = _median_seconds(device, multiply) / _PRODUCTS_PER_REPEAT
    return 2 * _NUM_TOKENS * _NUM_ROWS * _NUM_INPUTS / seconds


def _median_seconds(device: Device, work: Callable[[], None]) -> float:
    """Seconds on the card, between two events; the first run warms up."""
    times: list[float] = []
    with device_errors():
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(_REPEATS + 1):
            begin.record(device.stream)
            work()
            end.record(device.stream)
            end.synchronize()
            times.append(float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3)
    return statistics.median(times[1:])
