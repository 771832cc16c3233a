"""Launcher of kernels/scale_bias.cu: applies row scales and bias after a matrix product, in place."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import VECTOR, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec("scale_bias", "x * row_scale + bias, in place", ("scale_bias<4>", "scale_bias<1>"))

BLOCK = 256
STEPS = 4


def scale_bias(device: Device, *, x: Array, row_scale: Array | None, bias: Array | None) -> None:
    """Replace `x` by x * row_scale + bias; None means ones or zeros.

    Shapes: x [num_rows, num_columns] float32, rows any stride apart; row_scale [num_rows] float32; bias [num_columns]
    float32
    Raises: ValueError for arrays that do not fit
    """
    check("scale_bias", "x", x, dtype=np.float32, shape=(None, None), row_stride=True)
    num_rows, num_columns = x.shape
    if row_scale is not None:
        check("scale_bias", "row_scale", row_scale, dtype=np.float32, shape=(num_rows,), aligned=4)
    if bias is not None:
        check("scale_bias", "bias", bias, dtype=np.float32, shape=(num_columns,))
    stride = row_stride(x)
    vector = VECTOR if num_columns % VECTOR == 0 and stride % VECTOR == 0 else 1
    device.launch(
        "scale_bias",
        f"scale_bias<{vector}>",
        grid=(num_rows, -(-num_columns // (BLOCK * STEPS * vector))),
        block=BLOCK,
        arguments=(x, row_scale, bias, np.int32(num_columns), np.int32(stride)),
        cost=lambda: scale_bias_cost(num_rows=num_rows, num_columns=num_columns, has_bias=bias is not None),
    )


def scale_bias_cost(*, num_rows: int, num_columns: int, has_bias: bool) -> KernelCost:
    """Cost of one call."""
    count = num_rows * num_columns
    bias_bytes = 4 * num_columns * has_bias
    return KernelCost(4 * count + 4 * num_rows + bias_bytes, 4 * count, 2 * count, bias_bytes)
