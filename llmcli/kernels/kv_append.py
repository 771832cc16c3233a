"""Launcher of kv_append.cu: write the keys and values of many tokens to their places in the cache."""

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout, check_cache, check_layout, column_address, row_stride
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "kv_append",
    "append keys and values to the cache",
    tuple(f"kv_append<{kind}, {size}>" for kind in C_TYPES.values() for size in (8, 64, 80, 128, 256)),
)

_BLOCK_SIZE = 128


def kernel_name(keys: Array) -> str:
    """The name expression for this cache."""
    return f"kv_append<{c_type(keys)}, {keys.shape[3]}>"


def kv_append(
    device: Device,
    *,
    qkv: Array,
    layout: QkvLayout,
    rows: Array,
    positions: Array,
    keys: Array,
    values: Array,
) -> None:
    """Round the keys and values of n tokens to the cache's type and store them.

    Shapes: qkv [n, layout.width] float32, rows may be further apart; rows, positions [n] int32;
            keys, values [num_rows, num_key_value_heads, max_seq_len, head_dim], one layer's, in-out
    Raises: ValueError
    """
    check_layout("kv_append", layout)
    stride = row_stride("kv_append", qkv, layout)
    num_tokens = qkv.shape[0]
    check("kv_append", "rows", rows, dtype=np.int32, shape=(num_tokens,), aligned=4)
    check("kv_append", "positions", positions, dtype=np.int32, shape=(num_tokens,), aligned=4)
    max_seq_len = check_cache("kv_append", keys, values, layout)
    vectors = 2 * layout.kv_size * keys.dtype.itemsize // 16
    device.launch(
        "kv_append",
        kernel_name(keys),
        grid=(num_tokens, -(-vectors // _BLOCK_SIZE)),
        block=_BLOCK_SIZE,
        arguments=(
            column_address(qkv, layout.k_offset),
            column_address(qkv, layout.v_offset),
            np.int32(stride),
            rows,
            positions,
            keys,
            values,
            np.int32(layout.num_key_value_heads),
            np.int32(max_seq_len),
        ),
    )


def kv_append_cost(num_tokens: int, layout: QkvLayout, itemsize: int) -> KernelCost:
    """What one call moves; `itemsize` is the cache's."""
    elements = 2 * num_tokens * layout.kv_size
    return KernelCost(4 * elements, itemsize * elements, 0)
