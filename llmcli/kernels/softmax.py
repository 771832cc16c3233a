"""Launcher of kernels/softmax.cu: probabilities of rows of logits, or their logarithms."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import PACKED_FORMS, SCALAR_FORMS, VECTOR, RowForm, row_form, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

# One array of values is kept, so 64 registers suffice for a block of 1024 threads.
_FORMS = (*PACKED_FORMS, RowForm(1024, 8, VECTOR))

SPEC = KernelSpec(
    "softmax",
    "softmax or log-softmax of rows",
    tuple(f"softmax<{log}, {form.parameters}>" for log in ("false", "true") for form in _FORMS + SCALAR_FORMS),
)


def softmax(device: Device, *, x: Array, out: Array, log: bool = False) -> None:
    """Write softmax(x) to `out`, or its logarithm.

    Shapes: x, out [num_rows, num_columns] float32, rows any stride apart
    Raises: ValueError for arrays that do not fit
    """
    check("softmax", "x", x, dtype=np.float32, shape=(None, None), row_stride=True)
    check("softmax", "out", out, dtype=np.float32, shape=x.shape, row_stride=True)
    num_rows, num_columns = x.shape
    strides = row_stride(x), row_stride(out)
    form = row_form(num_columns, all(stride % VECTOR == 0 for stride in strides), _FORMS)
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
