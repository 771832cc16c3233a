"""Time of the row kernels on this card at the shapes of a 7B prefill, beside what their bytes take at a copy's speed.

Every call runs in a CUDA graph of many launches over a ring of arrays, more than the L2 cache holds unless the arrays
are tiny. The copy is measured in the same process; medians of some rounds. Then the forms of one kernel against each
other: a warp or a block a row, 16-byte or single loads, one block or many for a long row.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from benchmark_attention import copy_gbps, microseconds

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import embedding, embedding_cost
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.row_kernels import (
    MAX_SPLITS,
    PACKED_FORMS,
    RMS_NORM_SPEC,
    ROW_REDUCE_SPEC,
    SCALAR_FORMS,
    RowForm,
    rms_norm,
    rms_norm_cost,
    row_reduce,
    row_reduce_cost,
    softmax,
    softmax_cost,
    swiglu,
    swiglu_cost,
)

HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 4096, 11008, 32000
HALF_BYTES = 2
RING_BYTES = 1 << 29  # several times the L2 of any card
MAX_COPIES = 64


@dataclass(frozen=True)
class Case:
    """One kernel at one number of tokens: `make` returns a call with its own arrays."""

    name: str
    cost: KernelCost
    make: Callable[[], Callable[[], None]]

    @property
    def num_bytes(self) -> int:
        """Bytes that a call moves."""
        return self.cost.read_bytes + self.cost.written_bytes

    def calls(self) -> list[Callable[[], None]]:
        """Calls whose arrays together do not fit in L2, at most MAX_COPIES."""
        return [self.make() for _ in range(max(1, min(MAX_COPIES, RING_BYTES // self.num_bytes)))]


def normal(*shape: int) -> Any:
    """Float32 values on the card."""
    return cupy.random.standard_normal(shape, dtype=np.float32)


def empty(*shape: int, dtype: Any = np.float32) -> Any:
    """Zeros on the card."""
    return cupy.zeros(shape, dtype=dtype)


def cases(device: Device, n: int) -> list[Case]:
    """Every row kernel as the prefill of n tokens calls it; activations for the matrix product are float16."""

    layout = tile_layout("float16", VOCAB_SIZE, HIDDEN_SIZE)
    table = layout.place(empty(layout.arena_bytes, dtype=np.uint8))

    def make_embedding() -> Callable[[], None]:
        ids, out = cupy.random.randint(0, VOCAB_SIZE, n, dtype=np.int32), empty(n, HIDDEN_SIZE)
        return lambda: embedding(device, table=table, token_ids=ids, out=out)

    def make_rms_norm() -> Callable[[], None]:
        x, weight, scale = normal(n, HIDDEN_SIZE), normal(HIDDEN_SIZE), empty(n)
        out = empty(n, HIDDEN_SIZE, dtype=np.float16)
        return lambda: rms_norm(device, x=x, weight=weight, eps=1e-5, out=out, row_scale=scale)

    def make_swiglu() -> Callable[[], None]:
        x, scale, out_scale = normal(n, 2 * INTERMEDIATE_SIZE), cupy.ones(n, dtype=np.float32), empty(n)
        out = empty(n, INTERMEDIATE_SIZE, dtype=np.float16)
        return lambda: swiglu(device, gate_up=x, row_scale=scale, out=out, out_scale=out_scale)

    def make_reduce(op: Any, dtype: Any) -> Callable[[], Callable[[], None]]:
        def make() -> Callable[[], None]:
            x, out = normal(n, VOCAB_SIZE), empty(n, dtype=dtype)
            partials, counters = empty(n, 2 * MAX_SPLITS), empty(n, dtype=np.int32)
            return lambda: row_reduce(device, op=op, x=x, out=out, partials=partials, counters=counters)

        return make

    def make_softmax() -> Callable[[], None]:
        x, out = normal(n, VOCAB_SIZE), empty(n, VOCAB_SIZE)
        return lambda: softmax(device, x=x, out=out)

    hidden = {"num_rows": n, "num_columns": HIDDEN_SIZE}
    vocab = {"num_rows": n, "num_columns": VOCAB_SIZE}
    return [
        Case(
            "embedding",
            embedding_cost(num_tokens=n, hidden_size=HIDDEN_SIZE, itemsize=HALF_BYTES),
            make_embedding,
        ),
        Case("rms_norm", rms_norm_cost(**hidden, itemsize=HALF_BYTES), make_rms_norm),
        Case(
            "swiglu",
            swiglu_cost(num_rows=n, num_columns=INTERMEDIATE_SIZE, itemsize=HALF_BYTES),
            make_swiglu,
        ),
        Case("row_reduce argmax", row_reduce_cost(**vocab), make_reduce("argmax", np.int32)),
        Case("row_reduce log_sum_exp", row_reduce_cost(**vocab), make_reduce("log_sum_exp", np.float32)),
        Case("softmax", softmax_cost(**vocab), make_softmax),
    ]


def reduce_case(device: Device, form: RowForm, num_rows: int, num_columns: int) -> Case:
    """The sum of rows in a chosen form."""

    def make() -> Callable[[], None]:
        x, out = normal(num_rows, num_columns), empty(num_rows)
        sizes = (np.int32(num_rows), np.int32(num_columns), np.int32(num_columns))
        return lambda: device.launch(
            ROW_REDUCE_SPEC.stem,
            f"row_reduce<RowSum, {form.threads}, {form.vector}>",
            grid=form.grid(num_rows),
            block=form.block,
            arguments=(x, out, *sizes),
        )

    name = f"sum, {form.threads} threads a row, {4 * form.vector:>2}-byte loads"
    return Case(name, row_reduce_cost(num_rows=num_rows, num_columns=num_columns), make)


def split_case(device: Device, num_columns: int) -> Case:
    """The sum of one long row in the split form."""

    def make() -> Callable[[], None]:
        x, out = normal(1, num_columns), empty(1)
        partials, counters = empty(1, 2 * MAX_SPLITS), empty(1, dtype=np.int32)
        return lambda: row_reduce(device, op="sum", x=x, out=out, partials=partials, counters=counters)

    return Case("sum, many blocks a row", row_reduce_cost(num_rows=1, num_columns=num_columns), make)


def norm_case(device: Device, form: RowForm, n: int) -> Case:
    """RMSNorm in a chosen form; one that holds less than a row reads its rest twice."""

    def make() -> Callable[[], None]:
        x, weight, scale = normal(n, HIDDEN_SIZE), normal(HIDDEN_SIZE), empty(n)
        out = empty(n, HIDDEN_SIZE, dtype=np.float16)
        sizes = (np.int32(n), np.int32(HIDDEN_SIZE), np.float32(1e-5))
        return lambda: device.launch(
            RMS_NORM_SPEC.stem,
            f"rms_norm<__half, {form.parameters}>",
            grid=form.grid(n),
            block=form.block,
            arguments=(x, weight, out, scale, *sizes),
        )

    name = f"rms_norm<{form.parameters}>"
    return Case(name, rms_norm_cost(num_rows=n, num_columns=HIDDEN_SIZE, itemsize=HALF_BYTES), make)


def median_us(device: Device, calls: list[Callable[[], None]], arguments: Any) -> float:
    """Time of one launch."""
    return statistics.median(
        microseconds(device, lambda i: calls[i % len(calls)](), arguments.launches, arguments.rounds)
    )


def measure(device: Device, label: str, case: Case, gbps: float, arguments: Any) -> None:
    """Print one row."""
    median, floor = median_us(device, case.calls(), arguments), case.num_bytes / gbps / 1e3
    rate = case.num_bytes / median / 1e3
    print(f"{label:<14} {case.name:<44} {median:>9.2f} {floor:>9.2f} {rate:>7.0f} {rate / gbps:>6.1%}")
    cupy.get_default_memory_pool().free_all_blocks()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 512, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launches", type=int, default=50)
    arguments = parser.parse_args()
    device = Device.open()
    device.activate()
    with device.stream:
        gbps = copy_gbps(device, arguments.rounds)
        print(f"{device.name}, {device.arch}; a copy moves {gbps:.0f} GB/s")
        print(f"{'':<14} {'':<44} {'us':>9} {'floor us':>9} {'GB/s':>7} {'of it':>6}")
        for n in arguments.tokens:
            for case in cases(device, n):
                measure(device, f"{n} tokens", case, gbps, arguments)
        forms = [RowForm(threads, 1, vector) for threads in (32, 512) for vector in (1, 4)]
        for num_rows, num_columns in ((16384, 256), (16384, 1024), (4096, 4096), (1, 128256)):
            for form in forms:
                measure(
                    device,
                    f"{num_rows} x {num_columns}",
                    reduce_case(device, form, num_rows, num_columns),
                    gbps,
                    arguments,
                )
        measure(device, "1 x 128256", split_case(device, 128256), gbps, arguments)
        for n in arguments.tokens:
            for form in PACKED_FORMS + SCALAR_FORMS:
                measure(device, f"{n} tokens", norm_case(device, form, n), gbps, arguments)


if __name__ == "__main__":
    main()
