"""Launcher of head_norm.cu: RMSNorm of each head, in place."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.rows import VECTOR, RowForm, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

_HEAD_FORMS = (
    RowForm(2, 1, VECTOR),
    RowForm(4, 1, VECTOR),
    RowForm(8, 1, VECTOR),
    RowForm(16, 1, VECTOR),
    RowForm(32, 1, VECTOR),
    RowForm(32, 2, VECTOR),
)
_HEAD_SCALAR_FORM = RowForm(32, 8, 1)

HEAD_NORM_SPEC = KernelSpec(
    "head_norm",
    "RMSNorm of each head, in place",
    tuple(f"head_norm<{form.parameters}>" for form in (*_HEAD_FORMS, _HEAD_SCALAR_FORM)),
)


def head_norm(device: Launcher, *, x: Array, weight: Array, eps: float) -> None:
    """Replace each head of `x` by weight * head / rms(head).

    Shapes: x [num_rows, num_heads * head_dim] float32, rows any stride apart, such as the columns of q in a qkv buffer;
    weight [head_dim] float32, head_dim at most 256
    Raises: ValueError for arrays that do not fit
    """
    check("head_norm", "weight", weight, dtype=np.float32, shape=(None,))
    (head_dim,) = weight.shape
    is_packed = head_dim % VECTOR == 0 and row_stride(x) % VECTOR == 0
    check("head_norm", "x", x, dtype=np.float32, shape=(None, None), row_stride=True, aligned=16 if is_packed else 4)
    num_rows, num_columns = x.shape
    if num_columns % head_dim or not 1 <= head_dim <= _HEAD_SCALAR_FORM.num_columns:
        raise ValueError(f"head_norm: x has {num_columns} columns, not whole heads of {head_dim} (at most 256)")
    num_heads = num_columns // head_dim
    form = next(form for form in _HEAD_FORMS if head_dim <= form.num_columns) if is_packed else _HEAD_SCALAR_FORM
    device.launch(
        "head_norm",
        f"head_norm<{form.parameters}>",
        grid=form.grid(num_rows * num_heads),
        block=form.block,
        arguments=(
            x,
            weight,
            np.int32(num_rows),
            np.int32(num_heads),
            np.int32(head_dim),
            np.int32(row_stride(x)),
            np.float32(eps),
        ),
        cost=lambda: head_norm_cost(num_rows=num_rows, num_heads=num_heads, head_dim=head_dim),
    )


def head_norm_cost(*, num_rows: int, num_heads: int, head_dim: int) -> KernelCost:
    """Cost of one call."""
    count = num_rows * num_heads * head_dim
    return KernelCost(4 * count + 4 * head_dim, 4 * count, 4 * count, 4 * head_dim)
