"""Launchers of kernels that reduce rows of numbers: to one number each, or to probabilities."""

from typing import Literal

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.rows import PACKED_FORMS, SCALAR_FORMS, VECTOR, RowForm, row_form, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

RowOp = Literal["sum", "max", "argmax", "log_sum_exp"]

MAX_SPLITS = 64  # parts of a row in the split form

_OPS = {"sum": "RowSum", "max": "RowMax", "argmax": "RowArgmax", "log_sum_exp": "RowLogSumExp"}
_WARP_MAX_COLUMNS = 1024
_WARP_THREADS, _BLOCK_THREADS, _SPLIT_THREADS = 32, 512, 256
_SPLIT_MIN_COLUMNS = 8192
_MIN_COLUMNS_PER_SPLIT = 2048  # two vectors a thread

ROW_REDUCE_SPEC = KernelSpec(
    "row_reduce",
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
            "row_reduce",
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
        "row_reduce",
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
    "softmax",
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
        "softmax",
        f"softmax<{'true' if log else 'false'}, {form.parameters}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(x, out, np.int32(num_rows), np.int32(num_columns), np.int32(strides[0]), np.int32(strides[1])),
    )


def softmax_cost(*, num_rows: int, num_columns: int) -> KernelCost:
    """Cost of one call. An exponential counts as one operation; the second reading of long rows comes from L2."""
    count = num_rows * num_columns
    return KernelCost(4 * count, 4 * count, 5 * count)
