"""Launcher of kernels/round_rows.cu: rounds float32 activations for the matrix product."""

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import PACKED_FORMS, SCALAR_FORMS, VECTOR, row_form
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "round_rows",
    "rows rounded to the type of the matrix product, with a power of two each",
    tuple(f"round_rows<{c}, {form.parameters}>" for c in C_TYPES.values() for form in PACKED_FORMS + SCALAR_FORMS),
)


def round_rows(device: Device, *, x: Array, out: Array, row_scale: Array) -> None:
    """Write x / row_scale to `out`, and the power of two of each row to `row_scale`.

    Shapes: x [num_rows, num_columns] float32; out like x, any storage type; row_scale [num_rows] float32
    Raises: ValueError for arrays that do not fit
    """
    check("round_rows", "x", x, dtype=np.float32, shape=(None, None))
    num_rows, num_columns = x.shape
    check("round_rows", "out", out, dtype=tuple(C_TYPES), shape=x.shape)
    check("round_rows", "row_scale", row_scale, dtype=np.float32, shape=(num_rows,), aligned=4)
    form = row_form(num_columns, num_columns % VECTOR == 0)
    device.launch(
        "round_rows",
        f"round_rows<{c_type(out)}, {form.parameters}>",
        grid=form.grid(num_rows),
        block=form.block,
        arguments=(x, out, row_scale, np.int32(num_rows), np.int32(num_columns)),
        cost=lambda: round_rows_cost(num_rows=num_rows, num_columns=num_columns, itemsize=out.dtype.itemsize),
    )


def round_rows_cost(*, num_rows: int, num_columns: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of the output."""
    count = num_rows * num_columns
    return KernelCost(4 * count, itemsize * count + 4 * num_rows, count)
