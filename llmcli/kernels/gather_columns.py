"""Launcher of kernels/gather_columns.cu: puts the columns of rows into another order."""

from typing import Any

import numpy as np

from llmcli.kernels.arguments import C_TYPES, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

BLOCK = 256
STEPS = 4

_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))
_NAMES = tuple(f"gather_columns<{C_TYPES[dtype]}>" for dtype in _DTYPES)

SPEC = KernelSpec("gather_columns", "rows with their columns in another order", _NAMES)


def gather_columns(device: Device, *, x: Any, order: Any, out: Any) -> None:
    """Write column order[i] of x to column i of `out`. May start before the previous kernel has ended.

    Shapes: x [num_rows, num_columns] float32 or float16, rows any stride apart; order int32 [num_columns], columns of
            x; out [num_rows, num_columns] in x's type
    Raises: ValueError for arrays that do not fit
    """
    itemsize = x.dtype.itemsize
    check("gather_columns", "x", x, dtype=_DTYPES, shape=(None, None), row_stride=True, aligned=itemsize)
    num_rows, num_columns = x.shape
    check("gather_columns", "order", order, dtype=np.int32, shape=(num_columns,), aligned=4)
    check("gather_columns", "out", out, dtype=x.dtype, shape=x.shape, aligned=itemsize)
    device.launch(
        "gather_columns",
        f"gather_columns<{c_type(x)}>",
        grid=(num_rows, -(-num_columns // (BLOCK * STEPS))),
        block=BLOCK,
        arguments=(x, order, out, np.int32(num_columns), np.int32(row_stride(x))),
        overlaps=True,
        cost=lambda: gather_columns_cost(num_rows=num_rows, num_columns=num_columns, itemsize=itemsize),
    )


def gather_columns_cost(*, num_rows: int, num_columns: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of x."""
    num_bytes, order_bytes = num_rows * num_columns * itemsize, 4 * num_columns
    return KernelCost(num_bytes + order_bytes, num_bytes, 0, order_bytes)
