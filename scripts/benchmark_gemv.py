"""gemv on the matrices of well-known models: time, GB/s, and the part of the card's read bandwidth, in one process.

Each product is launched many times over a ring of copies larger than L2, captured as one CUDA graph. Rounds alternate
between products, and the medians are shown. Weights are random bytes: only their shapes matter.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import Epilogue, gemv, gemv_cost, plan_passes
from llmcli.kernels.read_bandwidth import num_blocks, read_bandwidth
from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout

# Name -> rows, inputs, epilogue, normed: qkv and gate_up as one matrix each.
MODELS: dict[str, dict[str, tuple[int, int, Epilogue, bool]]] = {
    "7B": {
        "qkv": (12288, 4096, "store", True),
        "o": (4096, 4096, "add", False),
        "gate_up": (22016, 4096, "swiglu", True),
        "down": (4096, 11008, "add", False),
        "head": (32000, 4096, "store", True),
    },
    "8B": {
        "qkv": (6144, 4096, "store", True),
        "o": (4096, 4096, "add", False),
        "gate_up": (28672, 4096, "swiglu", True),
        "down": (4096, 14336, "add", False),
        "head": (128256, 4096, "store", True),
    },
    "1B": {
        "qkv": (3072, 2048, "store", True),
        "o": (2048, 2048, "add", False),
        "gate_up": (16384, 2048, "swiglu", True),
        "down": (2048, 8192, "add", False),
        "head": (128256, 2048, "store", True),
    },
}
FORMATS: dict[str, tuple[str, int | None, str | None]] = {
    "int8 g128": ("int8", 128, "bfloat16"),
    "int8 channel": ("int8", None, "bfloat16"),
    "int4 g128": ("int4", 128, "bfloat16"),
    "bf16": ("bfloat16", None, None),
}
RING_BYTES = 400 * 10**6  # several times the L2 of any card


@dataclass
class Measured:
    """One captured series of launches."""

    name: str
    graph: Any
    num_launches: int
    num_bytes: int
    times_us: list[float]

    def run(self, stream: Any) -> None:
        """One round."""
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        self.graph.launch(stream)
        end.record(stream)
        end.synchronize()
        self.times_us.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / self.num_launches)


def capture(device: Device, name: str, calls: list[Callable[[], None]], num_launches: int, num_bytes: int) -> Measured:
    """The calls in turn, as one graph; each is made once before, so that it is compiled."""
    for call in calls:
        call()
    device.synchronize()
    device.stream.begin_capture()
    for i in range(num_launches):
        calls[i % len(calls)]()
    return Measured(name, device.stream.end_capture(), num_launches, num_bytes, [])


def random_bytes(num_bytes: int) -> Any:
    """Bytes whose float readings are finite: no exponent is full."""
    return cupy.resize(cupy.random.randint(0, 60, 2**24 + 16, dtype=np.uint8), num_bytes)


def matrices(layout: TileLayout) -> list[TiledMatrix]:
    """Copies that do not fit in L2 together."""
    count = max(2, -(-RING_BYTES // layout.num_bytes))
    return [layout.place(random_bytes(layout.arena_bytes)) for _ in range(count)]


def product(device: Device, layout: TileLayout, epilogue: Epilogue, has_norm: bool, num_rows: int) -> list[Any]:
    """One call for each matrix of the ring."""
    x = cupy.random.standard_normal((num_rows, layout.num_inputs), dtype=np.float32)
    num_outputs = layout.num_rows // (2 if epilogue == "swiglu" else 1)
    out = cupy.zeros((num_rows, num_outputs), dtype=np.float32)
    norm_weight = cupy.ones(layout.num_inputs, dtype=np.float32) if has_norm else None

    def call(matrix: TiledMatrix) -> Callable[[], None]:
        return lambda: gemv(device, matrix=matrix, x=x, out=out, norm_weight=norm_weight, eps=1e-5, epilogue=epilogue)

    return [call(matrix) for matrix in matrices(layout)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launches", type=int, default=200)
    arguments = parser.parse_args()
    device = Device.open()
    device.activate()
    print(f"{device.name}, {device.arch}, {device.num_multiprocessors} multiprocessors")
    with device.stream:
        gbps = measure_bandwidth(device, arguments.rounds)
        print(f"read bandwidth {gbps:.0f} GB/s")
        print(f"{'':<34} {'rows':>4} {'us':>8} {'GB/s':>6} {'of it':>6} {'over bytes':>11}")
        for model in arguments.models:
            for form in arguments.formats:
                for num_rows in arguments.rows:
                    measure(device, model, form, num_rows, gbps, arguments)


def measure_bandwidth(device: Device, num_rounds: int) -> float:
    """What the card reads when nothing else is asked of it, in GB/s."""
    memory, sums = (
        random_bytes(min(4 * 2**30, cupy.cuda.runtime.memGetInfo()[0] // 4 // 16 * 16)),
        cupy.zeros(num_blocks(device), dtype=np.uint32),
    )
    reading = [lambda: read_bandwidth(device, memory=memory, sums=sums)]
    bandwidth = capture(device, "read", reading, 4, memory.nbytes)
    for _ in range(num_rounds):
        bandwidth.run(device.stream)
    return float(memory.nbytes / statistics.median(bandwidth.times_us) / 1e3)


def measure(device: Device, model: str, form: str, num_rows: int, gbps: float, arguments: Any) -> None:
    """All products of a model in one format, then what a layer takes."""
    weight_type, group_size, scale_type = FORMATS[form]
    series = []
    for name, (rows, inputs, epilogue, has_norm) in MODELS[model].items():
        layout = tile_layout(weight_type, rows, inputs, group_size, scale_type)
        plans = plan_passes(
            layout,
            num_rows,
            num_multiprocessors=device.num_multiprocessors,
            shared_bytes_per_block=device.shared_bytes_per_block,
            can_cluster=device.can_cluster,
        )
        costs = [gemv_cost(plan, layout, epilogue=epilogue, has_norm=has_norm) for plan in plans]
        calls = product(device, layout, epilogue, has_norm, num_rows)
        num_bytes = sum(cost.read_bytes + cost.written_bytes for cost in costs)
        series.append(capture(device, name, calls, arguments.launches, num_bytes))
        series[-1].run(device.stream)
    for one in series:
        one.times_us.clear()
    for _ in range(arguments.rounds):
        for one in series:
            one.run(device.stream)
    medians = {one.name: statistics.median(one.times_us) for one in series}
    for one in series:
        median, least = medians[one.name], one.num_bytes / gbps / 1e3
        rate = one.num_bytes / median / 1e3
        label = f"{model} {form} {one.name}"
        print(f"{label:<34} {num_rows:>4} {median:>8.2f} {rate:>6.0f} {rate / gbps:>6.1%} {median - least:>+8.2f} us")
    layer = [one for one in series if one.name != "head"]
    total = sum(medians[one.name] for one in layer)
    rate = sum(one.num_bytes for one in layer) / total / 1e3
    print(f"{f'{model} {form} a layer':<34} {num_rows:>4} {total:>8.2f} {rate:>6.0f} {rate / gbps:>6.1%}")
    cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
