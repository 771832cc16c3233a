"""Launcher of kernels/rms_norm.cu: the norm before attention, MLP and output, rounded for the matrix product."""

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import PACKED_FORMS, SCALAR_FORMS, VECTOR, row_form
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "rms_norm",
    "RMSNorm of rows, rounded to the type of the matrix product",
    tuple(f"rms_norm<{c}, {form.parameters}>" for c in C_TYPES.values() for form in PACKED_FORMS + SCALAR_FORMS),
)


def rms_norm(device: Device, *, x: Array, weight: Array, eps: float, out: Array, row_scale: Array) -> None:
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
        "rms_norm",
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
