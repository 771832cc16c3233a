"""Launchers of the lab's kernels in kernels/studies/rows: RMSNorm, SwiGLU, softmax, sums. No model launches them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmcli.kernels.arguments import C_TYPES, VECTOR, Array, c_type, check, row_stride
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS

RowOp = Literal["sum", "max", "argmax", "log_sum_exp"]

_WARP = 32
_WARP_FORM_BLOCK = 128


@dataclass(frozen=True)
class RowForm:
    """`threads` threads a row (32: a warp, more: a block) take `vector` columns each, `steps` times, in registers."""

    threads: int
    steps: int
    vector: int

    @property
    def num_columns(self) -> int:
        """Columns that are kept in registers."""
        return self.threads * self.steps * self.vector

    @property
    def block(self) -> int:
        """Threads of a block."""
        return _WARP_FORM_BLOCK if self.threads <= _WARP else self.threads

    @property
    def parameters(self) -> str:
        """The template parameters ROW_THREADS, STEPS, VECTOR."""
        return f"{self.threads}, {self.steps}, {self.vector}"

    def grid(self, num_rows: int) -> tuple[int]:
        """Blocks for `num_rows` rows."""
        return (-(-num_rows * self.threads // self.block),)


# By rising size; a row longer than the last form holds is partly read twice.
PACKED_FORMS = (
    RowForm(32, 2, VECTOR),
    RowForm(32, 8, VECTOR),
    RowForm(256, 4, VECTOR),
    RowForm(512, 4, VECTOR),
    RowForm(512, 8, VECTOR),
)
SCALAR_FORMS = (RowForm(32, 8, 1), RowForm(1024, 8, 1))


def row_form(num_columns: int, is_packed: bool, packed_forms: Sequence[RowForm] = PACKED_FORMS) -> RowForm:
    """The smallest form that holds a row, else the largest; `is_packed` if all rows are 16-byte aligned."""
    forms = packed_forms if is_packed else SCALAR_FORMS
    return next((form for form in forms if num_columns <= form.num_columns), forms[-1])


RMS_NORM_SPEC = KernelSpec(
    "studies/rows/rms_norm",
    "RMSNorm of rows, rounded to the type of the matrix product",
    tuple(f"rms_norm<{c}, {form.parameters}>" for c in C_TYPES.values() for form in PACKED_FORMS + SCALAR_FORMS),
)


def rms_norm(device: Launcher, *, x: Array, weight: Array, eps: float, out: Array, row_scale: Array) -> None:
    """Write weight * x / rms(x) / row_scale to `out`, and the power of two of each row to `row_scale`.

    Shapes: x [num_rows, num_columns] float32; weight [num_columns] float32; out like x, any storage type; row_scale
    [num_rows] float32
    Raises: ValueError for arrays that do not fit
    """
    check("rms_norm", "x", x, dtype=np.float32, shape=(None, None))
    num_rows, num_columns = x.shape
    check("rms_norm", "weight", weight, dtype=np.float32, shape=(num_columns,))
    check("rms_norm", "out", out, dtype=tuple(C_TYPES), shape=x.shape)
    check("rms_norm", "row_scale", row_scale, dtype=np.float32, shape=(num_rows,), aligned=4)
    form = row_form(num_columns, num_columns % VECTOR == 0)
    device.launch(
        "studies/rows/rms_norm",
        f"rms_norm<{c_type(out)}, {form.parameters}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(x, weight, out, row_scale, np.int32(num_rows), np.int32(num_columns), np.float32(eps)),
        cost=lambda: rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=out.dtype.itemsize),
    )


def rms_norm_cost(*, num_rows: int, num_columns: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of the output."""
    count = num_rows * num_columns
    weight_bytes = 4 * num_columns
    return KernelCost(4 * count + weight_bytes, itemsize * count + 4 * num_rows, 4 * count, weight_bytes)


SWIGLU_SPEC = KernelSpec(
    "studies/rows/swiglu",
    "silu(gate) * up of rows, rounded to the type of the matrix product",
    tuple(f"swiglu<{c}, {form.parameters}>" for c in C_TYPES.values() for form in PACKED_FORMS + SCALAR_FORMS),
)


def swiglu(device: Launcher, *, gate_up: Array, row_scale: Array, out: Array, out_scale: Array) -> None:
    """Write silu(gate) * up / out_scale to `out`, where gate and up are those columns of `gate_up` times `row_scale`.

    Shapes: gate_up [num_rows, 16 * ceil(intermediate_size / 8) or more] float32, 8 columns of gate and 8 of up in
    turn; row_scale, out_scale [num_rows] float32; out [num_rows, intermediate_size], any storage type
    Raises: ValueError for arrays that do not fit
    """
    check("swiglu", "out", out, dtype=tuple(C_TYPES), shape=(None, None))
    num_rows, num_columns = out.shape
    check("swiglu", "gate_up", gate_up, dtype=np.float32, shape=(num_rows, None), row_stride=True)
    needed = TILE_ROWS * -(-num_columns // HALF_ROWS)
    if gate_up.shape[1] < needed:
        raise ValueError(f"swiglu: gate_up has {gate_up.shape[1]} columns, {num_columns} outputs need {needed}")
    for name, scale in (("row_scale", row_scale), ("out_scale", out_scale)):
        check("swiglu", name, scale, dtype=np.float32, shape=(num_rows,), aligned=4)
    stride = row_stride(gate_up)
    form = row_form(num_columns, num_columns % VECTOR == 0 and stride % VECTOR == 0)
    device.launch(
        "studies/rows/swiglu",
        f"swiglu<{c_type(out)}, {form.parameters}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(gate_up, row_scale, out, out_scale, np.int32(num_rows), np.int32(num_columns), np.int32(stride)),
        cost=lambda: swiglu_cost(num_rows=num_rows, num_columns=num_columns, itemsize=out.dtype.itemsize),
    )


def swiglu_cost(*, num_rows: int, num_columns: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of the output. An exponential and a division count as one operation each."""
    count = num_rows * num_columns
    return KernelCost(8 * count + 4 * num_rows, itemsize * count + 4 * num_rows, 7 * count)


MAX_SPLITS = 64  # parts of a row in the split form

_OPS = {"sum": "RowSum", "max": "RowMax", "argmax": "RowArgmax", "log_sum_exp": "RowLogSumExp"}
_WARP_MAX_COLUMNS = 1024
_WARP_THREADS, _BLOCK_THREADS, _SPLIT_THREADS = 32, 512, 256
_SPLIT_MIN_COLUMNS = 8192
_MIN_COLUMNS_PER_SPLIT = 2048  # two vectors a thread

ROW_REDUCE_SPEC = KernelSpec(
    "studies/rows/row_reduce",
    "sum, maximum, argmax or log-sum-exp of rows",
    tuple(
        f"{kernel}<{op}, {threads}, {vector}>"
        for op in _OPS.values()
        for vector in (VECTOR, 1)
        for kernel, threads in (
            ("row_reduce", _WARP_THREADS),
            ("row_reduce", _BLOCK_THREADS),
            ("row_reduce_split", _SPLIT_THREADS),
        )
    ),
)


def row_reduce(
    device: Launcher,
    *,
    op: RowOp,
    x: Array,
    out: Array,
    partials: Array | None = None,
    counters: Array | None = None,
) -> None:
    """Write the sum, maximum, argmax (lowest index of the largest value) or log-sum-exp of each row to `out`.

    With a workspace, a few long rows are each spread over many blocks; `partials` is overwritten, `counters` must be 0
    and is 0 again afterwards.
    Shapes: x [num_rows, num_columns] float32, rows any stride apart; out [num_rows] float32, int32 for argmax; partials
    [num_rows or more, 2 * MAX_SPLITS] float32; counters [num_rows or more] int32
    Raises: ValueError for arrays that do not fit
    """
    check("row_reduce", "x", x, dtype=np.float32, shape=(None, None), row_stride=True)
    num_rows, num_columns = x.shape
    check("row_reduce", "out", out, dtype=np.int32 if op == "argmax" else np.float32, shape=(num_rows,), aligned=4)
    stride = row_stride(x)
    vector = VECTOR if stride % VECTOR == 0 else 1
    is_long = num_columns >= _SPLIT_MIN_COLUMNS and 2 * num_rows <= device.num_multiprocessors
    if is_long and partials is not None and counters is not None:
        check("row_reduce", "partials", partials, dtype=np.float32, shape=(None, 2 * MAX_SPLITS))
        check("row_reduce", "counters", counters, dtype=np.int32, shape=(None,), aligned=4)
        if min(partials.shape[0], counters.shape[0]) < num_rows:
            raise ValueError(f"row_reduce: the workspace is for fewer than {num_rows} rows")
        columns_per_split = split_columns(num_columns)
        device.launch(
            "studies/rows/row_reduce",
            f"row_reduce_split<{_OPS[op]}, {_SPLIT_THREADS}, {vector}>",
            grid=(-(-num_columns // columns_per_split), num_rows),
            block=_SPLIT_THREADS,
            arguments=(
                x,
                partials,
                counters,
                out,
                np.int32(num_columns),
                np.int32(stride),
                np.int32(columns_per_split),
            ),
        )
        return
    threads = _WARP_THREADS if num_columns <= _WARP_MAX_COLUMNS else _BLOCK_THREADS
    form = RowForm(threads, 1, vector)
    device.launch(
        "studies/rows/row_reduce",
        f"row_reduce<{_OPS[op]}, {threads}, {vector}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(x, out, np.int32(num_rows), np.int32(num_columns), np.int32(stride)),
    )


def split_columns(num_columns: int) -> int:
    """Columns of each part but the last in the split form, whole vectors."""
    needed = max(_MIN_COLUMNS_PER_SPLIT, -(-num_columns // MAX_SPLITS))
    return -(-needed // VECTOR) * VECTOR


def row_reduce_cost(*, num_rows: int, num_columns: int) -> KernelCost:
    """Cost of one call in the warp or block form; the split form moves at most 512 bytes a row more."""
    count = num_rows * num_columns
    return KernelCost(4 * count, 4 * num_rows, count)


# One array of values is kept, so 64 registers suffice for a block of 1024 threads.
_SOFTMAX_FORMS = (*PACKED_FORMS, RowForm(1024, 8, VECTOR))

SOFTMAX_SPEC = KernelSpec(
    "studies/rows/softmax",
    "softmax or log-softmax of rows",
    tuple(f"softmax<{log}, {form.parameters}>" for log in ("false", "true") for form in _SOFTMAX_FORMS + SCALAR_FORMS),
)


def softmax(device: Launcher, *, x: Array, out: Array, log: bool = False) -> None:
    """Write softmax(x) to `out`, or its logarithm.

    Shapes: x, out [num_rows, num_columns] float32, rows any stride apart
    Raises: ValueError for arrays that do not fit
    """
    check("softmax", "x", x, dtype=np.float32, shape=(None, None), row_stride=True)
    check("softmax", "out", out, dtype=np.float32, shape=x.shape, row_stride=True)
    num_rows, num_columns = x.shape
    strides = row_stride(x), row_stride(out)
    form = row_form(num_columns, all(stride % VECTOR == 0 for stride in strides), _SOFTMAX_FORMS)
    device.launch(
        "studies/rows/softmax",
        f"softmax<{'true' if log else 'false'}, {form.parameters}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(x, out, np.int32(num_rows), np.int32(num_columns), np.int32(strides[0]), np.int32(strides[1])),
    )


def softmax_cost(*, num_rows: int, num_columns: int) -> KernelCost:
    """Cost of one call. An exponential counts as one operation; the second reading of long rows comes from L2."""
    count = num_rows * num_columns
    return KernelCost(4 * count, 4 * count, 5 * count)
