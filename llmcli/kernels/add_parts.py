"""Launcher of kernels/add_parts.cu: adds the parts of a product to its first part or to the residual stream."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.rows import VECTOR
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec("add_parts", "out += each part of a product, in order", ("add_parts<4>", "add_parts<1>"))

BLOCK_SIZE = 256


def add_parts(device: Device, *, parts: Array, out: Array) -> None:
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
        grid=(-(-size // (BLOCK_SIZE * vector)),),
        block=BLOCK_SIZE,
        arguments=(parts, out, np.int32(num_parts), np.int32(size)),
        overlaps=True,
        cost=lambda: add_parts_cost(num_parts=num_parts, size=size),
    )


def add_parts_cost(*, num_parts: int, size: int) -> KernelCost:
    """What one call moves and computes."""
    return KernelCost(4 * size * (num_parts + 1), 4 * size, num_parts * size)
