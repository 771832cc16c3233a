"""Launcher of rotary.cu: rotate the heads of many tokens by their positions."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import HEAD_DIM_STEP
from llmcli.kernels.rows import row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec("rotary", "rotary embedding in place", tuple(f"rotary<{size}>" for size in (8, 64, 80, 128, 256)))

_BLOCK_SIZE = 128


def rotary(device: Device, *, x: Array, positions: Array, cos_sin: Array) -> None:
    """Rotate heads in place, in Hugging Face's half-split form.

    Shapes: x [n, num_heads * head_dim] float32, in-out, rows may be further apart; positions [n] int32;
            cos_sin [max_seq_len, head_dim / 2, 2] float32
    Raises: ValueError
    """
    check("rotary", "cos_sin", cos_sin, dtype=np.float32, shape=(None, None, 2))
    head_dim = 2 * cos_sin.shape[1]
    if head_dim % HEAD_DIM_STEP or not head_dim:
        raise ValueError(f"rotary: head_dim is {head_dim}, expected a multiple of {HEAD_DIM_STEP}")
    check("rotary", "x", x, dtype=np.float32, shape=(None, None), row_stride=True)
    num_tokens, width = x.shape
    if width % head_dim:
        raise ValueError(f"rotary: {width} columns are not whole heads of {head_dim}")
    stride = row_stride(x)
    if stride % 4:
        raise ValueError(f"rotary: rows of x are {stride} columns apart, expected a multiple of 4")
    check("rotary", "positions", positions, dtype=np.int32, shape=(num_tokens,), aligned=4)
    device.launch(
        "rotary",
        f"rotary<{head_dim}>",
        grid=(num_tokens, -(-width // 8 // _BLOCK_SIZE)),
        block=_BLOCK_SIZE,
        arguments=(x, np.int32(stride), np.int32(width // head_dim), positions, cos_sin),
        cost=lambda: rotary_cost(num_tokens, width),
    )


def rotary_cost(num_tokens: int, width: int) -> KernelCost:
    """What one call moves and computes; `width` columns of all heads."""
    elements = num_tokens * width
    return KernelCost(4 * elements, 4 * elements, 3 * elements)
