"""Launchers of kernels that look up, move or add elements."""

from typing import Any

import numpy as np

from llmcli.kernels.arguments import C_TYPES, VECTOR, Array, check, int32s, row_stride
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_wide import STEP_INPUTS, UNIT_INPUTS, check_image, num_steps
from llmcli.kernels.tiles import WEIGHT_BITS, WEIGHT_C_TYPES, TiledMatrix

_BLOCK, _STEPS = 256, 4  # threads of a block, and columns of a thread of gather_columns

EMBEDDING_SPEC = KernelSpec(
    "embedding",
    "rows of a table, widened",
    tuple(f"embedding<{c}, {v}>" for c in C_TYPES.values() for v in (VECTOR, 1)),
)


def embedding(device: Launcher, *, table: TiledMatrix, token_ids: Array, rows: Array | None = None, out: Array) -> None:
    """Write the vectors of tokens to `out`. Ids are checked by the caller; one not in the table gives a row of NaN.

    With `rows` the id of token t is token_ids[rows[t]], which the caller checks too, and row -1 gives zeros.
    This launch must not overlap: it starts when all work before it has ended. Later kernels read rows, positions and
    cached tokens before they wait, and the step before wrote these (kernels/common/launch.cuh).
    Shapes: table [vocab_size, hidden_size] of floats; token_ids [num_tokens] int32, or of any size with rows
            [num_tokens] int32; out [num_tokens, hidden_size] float32
    Raises: ValueError for arrays that do not fit
    """
    layout, hidden_size = table.layout, table.layout.num_inputs
    if layout.has_scales:
        raise ValueError(f"embedding: the table has {layout.weight_type} weights, expected floats")
    check("embedding", "token_ids", token_ids, dtype=np.int32, shape=(None,), aligned=4)
    if rows is not None:
        check("embedding", "rows", rows, dtype=np.int32, shape=(None,), aligned=4)
    (num_tokens,) = token_ids.shape if rows is None else rows.shape
    check("embedding", "out", out, dtype=np.float32, shape=(num_tokens, hidden_size))
    vector = VECTOR if hidden_size % VECTOR == 0 else 1
    device.launch(
        "embedding",
        f"embedding<{WEIGHT_C_TYPES[layout.weight_type]}, {vector}>",
        grid=(num_tokens,),
        block=_BLOCK,
        arguments=(table.tiles, token_ids, rows, out, np.int32(layout.num_rows), np.int32(hidden_size)),
        cost=lambda: embedding_cost(
            num_tokens=num_tokens, hidden_size=hidden_size, itemsize=WEIGHT_BITS[layout.weight_type] // 8
        ),
    )


def embedding_cost(*, num_tokens: int, hidden_size: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of the table."""
    count = num_tokens * hidden_size
    return KernelCost(itemsize * count + 4 * num_tokens, 4 * count, 0, itemsize * count)


GATHER_COLUMNS_SPEC = KernelSpec(
    "gather_columns",
    "rows or an image with columns in another order",
    tuple(f"gather_columns<{unit_inputs}>" for unit_inputs in (0, *UNIT_INPUTS)),
)


def gather_columns(device: Launcher, *, x: Any, order: Any, out: Any) -> None:
    """Write column order[i] of x to column i of `out`. May start before the previous kernel has ended.

    Shapes: x, out float16 [num_rows, num_columns], rows any stride apart; order int32 [num_columns], columns of x
    Raises: ValueError for arrays that do not fit
    """
    check("gather_columns", "x", x, dtype=np.float16, shape=(None, None), row_stride=True, aligned=2)
    check("gather_columns", "out", out, dtype=np.float16, shape=x.shape, row_stride=True, aligned=2)
    check("gather_columns", "order", order, dtype=np.int32, shape=x.shape[1:], aligned=4)
    _gather(device, x, order, out, 0, len(x), (row_stride(x), row_stride(out)))


def gather_image(device: Launcher, *, image: Any, order: Any, unit_inputs: int, rows: int, out: Any) -> None:
    """Do the same for the image of `rows` tokens, for a matrix whose units have `unit_inputs` inputs.

    Shapes: image, out uint8 [at least image_bytes]; order int32 [num_columns]
    Raises: ValueError for arrays that do not fit
    """
    check("gather_columns", "order", order, dtype=np.int32, shape=(None,), aligned=4)
    for name, array in (("image", image), ("out", out)):
        check_image("gather_columns", name, array, len(order), rows)
    _gather(device, image, order, out, unit_inputs, rows, (0, 0))


def _gather(
    device: Launcher, x: Any, order: Any, out: Any, unit_inputs: int, num_rows: int, strides: tuple[int, int]
) -> None:
    (num_columns,) = order.shape
    columns = num_steps(num_columns) * STEP_INPUTS if unit_inputs else num_columns
    device.launch(
        "gather_columns",
        f"gather_columns<{unit_inputs}>",
        grid=(num_rows, -(-columns // (_BLOCK * _STEPS))),
        block=_BLOCK,
        arguments=(x, order, out, *int32s(num_columns, *strides)),
        overlaps=True,
        cost=lambda: gather_columns_cost(num_rows=num_rows, num_columns=num_columns),
    )


def gather_columns_cost(*, num_rows: int, num_columns: int) -> KernelCost:
    """Cost of one call."""
    num_bytes, order_bytes = 2 * num_rows * num_columns, 4 * num_columns
    return KernelCost(num_bytes + order_bytes, num_bytes, 0, order_bytes)


ADD_PARTS_SPEC = KernelSpec("add_parts", "out += each part of a product, in order", ("add_parts<4>", "add_parts<1>"))


def add_parts(device: Launcher, *, parts: Array, out: Array) -> None:
    """Add each of `parts` to `out`, one after the other.

    Shapes: parts float32 [num_parts, num_rows, num_columns]; out float32 [num_rows, num_columns]
    Raises: ValueError for arrays that do not fit
    """
    check("add_parts", "out", out, dtype=np.float32, shape=(None, None))
    check("add_parts", "parts", parts, dtype=np.float32, shape=(None, *out.shape))
    num_parts, size = parts.shape[0], out.shape[0] * out.shape[1]
    vector = VECTOR if size % VECTOR == 0 else 1
    device.launch(
        "add_parts",
        f"add_parts<{vector}>",
        grid=(-(-size // (_BLOCK * vector)),),
        block=_BLOCK,
        arguments=(parts, out, np.int32(num_parts), np.int32(size)),
        overlaps=True,
        cost=lambda: add_parts_cost(num_parts=num_parts, size=size),
    )


def add_parts_cost(*, num_parts: int, size: int) -> KernelCost:
    """What one call moves and computes."""
    return KernelCost(4 * size * (num_parts + 1), 4 * size, num_parts * size)
