"""Launcher of kernels/embedding.cu: looks up the vectors of tokens, widened to the residual stream's float32."""

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import VECTOR
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "embedding",
    "rows of a table, widened",
    tuple(f"embedding<{c}, {v}>" for c in C_TYPES.values() for v in (VECTOR, 1)),
)

_BLOCK = 256


def embedding(device: Device, *, table: Array, token_ids: Array, rows: Array | None = None, out: Array) -> None:
    """Write the vectors of tokens to `out`. Ids are checked by the caller; one not in the table gives a row of NaN.

    With `rows` the id of token t is token_ids[rows[t]], which the caller checks too, and row -1 gives zeros.
    This launch must not overlap: it starts when all work before it has ended. Later kernels read rows, positions and
    cached tokens before they wait, and the step before wrote these (kernels/common/launch.cuh).
    Shapes: table [vocab_size, hidden_size], any storage type; token_ids [num_tokens] int32, or of any size with rows
            [num_tokens] int32; out [num_tokens, hidden_size] float32
    Raises: ValueError for arrays that do not fit
    """
    check("embedding", "table", table, dtype=tuple(C_TYPES), shape=(None, None))
    vocab_size, hidden_size = table.shape
    check("embedding", "token_ids", token_ids, dtype=np.int32, shape=(None,), aligned=4)
    if rows is not None:
        check("embedding", "rows", rows, dtype=np.int32, shape=(None,), aligned=4)
    (num_tokens,) = token_ids.shape if rows is None else rows.shape
    check("embedding", "out", out, dtype=np.float32, shape=(num_tokens, hidden_size))
    vector = VECTOR if hidden_size % VECTOR == 0 else 1
    device.launch(
        "embedding",
        f"embedding<{c_type(table)}, {vector}>",
        grid=(num_tokens,),
        block=_BLOCK,
        arguments=(table, token_ids, rows, out, np.int32(vocab_size), np.int32(hidden_size)),
        cost=lambda: embedding_cost(num_tokens=num_tokens, hidden_size=hidden_size, itemsize=table.dtype.itemsize),
    )


def embedding_cost(*, num_tokens: int, hidden_size: int, itemsize: int) -> KernelCost:
    """Cost of one call; `itemsize` is that of the table."""
    count = num_tokens * hidden_size
    return KernelCost(itemsize * count + 4 * num_tokens, 4 * count, 0, itemsize * count)
