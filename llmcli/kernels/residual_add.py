"""Launcher of kernels/residual_add.cu: adds the outputs of attention or MLP to the residual stream."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import VECTOR, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec("residual_add", "hidden += x * row_scale + bias", ("residual_add<4>", "residual_add<1>"))

BLOCK = 256
STEPS = 4


def residual_add(device: Device, *, x: Array, row_scale: Array | None, bias: Array | None, hidden: Array) -> None:
    """Add x * row_scale + bias to `hidden`; None means ones or zeros.

    Shapes: x [num_rows, hidden_size or more] float32, rows any stride apart; row_scale [num_rows] float32; bias
    [hidden_size] float32; hidden [num_rows, hidden_size] float32
    Raises: ValueError for arrays that do not fit
    """
    check("residual_add", "hidden", hidden, dtype=np.float32, shape=(None, None))
    num_rows, num_columns = hidden.shape
    check("residual_add", "x", x, dtype=np.float32, shape=(num_rows, None), row_stride=True)
    if x.shape[1] < num_columns:
        raise ValueError(f"residual_add: x has {x.shape[1]} columns, hidden has {num_columns}")
    if row_scale is not None:
        check("residual_add", "row_scale", row_scale, dtype=np.float32, shape=(num_rows,), aligned=4)
    if bias is not None:
        check("residual_add", "bias", bias, dtype=np.float32, shape=(num_columns,))
    stride = row_stride(x)
    vector = VECTOR if num_columns % VECTOR == 0 and stride % VECTOR == 0 else 1
    device.launch(
        "residual_add",
        f"residual_add<{vector}>",
        grid=(num_rows, -(-num_columns // (BLOCK * STEPS * vector))),
        block=BLOCK,
        arguments=(x, row_scale, bias, hidden, np.int32(num_columns), np.int32(stride)),
        cost=lambda: residual_add_cost(num_rows=num_rows, num_columns=num_columns, has_bias=bias is not None),
    )


def residual_add_cost(*, num_rows: int, num_columns: int, has_bias: bool) -> KernelCost:
    """Cost of one call."""
    count = num_rows * num_columns
    bias_bytes = 4 * num_columns * has_bias
    return KernelCost(8 * count + 4 * num_rows + bias_bytes, 4 * count, 3 * count, bias_bytes)
