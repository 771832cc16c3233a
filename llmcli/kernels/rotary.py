"""Launcher of rotary.cu: rotate the query heads of many tokens by their positions."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout, check_layout, check_qkv
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec("rotary", "rotary embedding in place", tuple(f"rotary<{size}>" for size in (8, 64, 80, 128, 256)))

_BLOCK_SIZE = 128


def kernel_name(layout: QkvLayout) -> str:
    """The name expression for these heads."""
    return f"rotary<{layout.head_dim}>"


def rotary(device: Device, *, qkv: Array, layout: QkvLayout, positions: Array, cos_sin: Array) -> None:
    """Rotate queries where they lie, in Hugging Face's half-split form.

    Shapes: qkv [n, layout.width] float32, in-out, rows may be further apart; positions [n] int32;
            cos_sin [max_seq_len, head_dim / 2, 2] float32
    Raises: ValueError
    """
    check_layout("rotary", layout)
    stride = check_qkv("rotary", qkv, layout)
    num_tokens = qkv.shape[0]
    check("rotary", "positions", positions, dtype=np.int32, shape=(num_tokens,), aligned=4)
    check("rotary", "cos_sin", cos_sin, dtype=np.float32, shape=(None, layout.head_dim // 2, 2))
    vectors = layout.q_size // 8
    device.launch(
        "rotary",
        kernel_name(layout),
        grid=(num_tokens, -(-vectors // _BLOCK_SIZE)),
        block=_BLOCK_SIZE,
        arguments=(
            qkv,
            np.int32(stride),
            np.int32(layout.num_attention_heads),
            positions,
            cos_sin,
        ),
        cost=lambda: rotary_cost(num_tokens, layout),
    )


def rotary_cost(num_tokens: int, layout: QkvLayout) -> KernelCost:
    """What one call moves and computes."""
    elements = num_tokens * layout.q_size
    return KernelCost(4 * elements, 4 * elements, 3 * elements)
