"""Launcher of kernels/swiglu.cu: the MLP's gate times up, rounded for the down projection."""

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import PACKED_FORMS, SCALAR_FORMS, VECTOR, row_form, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS

SPEC = KernelSpec(
    "swiglu",
    "silu(gate) * up of rows, rounded to the type of the matrix product",
    tuple(f"swiglu<{c}, {form.parameters}>" for c in C_TYPES.values() for form in PACKED_FORMS + SCALAR_FORMS),
)


def swiglu(device: Device, *, gate_up: Array, row_scale: Array, out: Array, out_scale: Array) -> None:
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
        "swiglu",
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
