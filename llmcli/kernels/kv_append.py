"""Launcher of kv_append.cu: write the keys and values of a row's chunk to their places in the cache."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import (
    CACHE_TYPES,
    QkvLayout,
    cached_bytes,
    check_cache,
    check_layout,
    check_qkv,
    column_address,
    has_scales,
)
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "kv_append",
    "append keys and values to the cache",
    tuple(f"kv_append<{kind}, {size}>" for kind in CACHE_TYPES.values() for size in (8, 64, 80, 128, 256)),
)

_BLOCK_SIZE = 128


def kernel_name(keys: Array) -> str:
    """The name expression for this cache."""
    return f"kv_append<{CACHE_TYPES[keys.dtype]}, {keys.shape[3]}>"


def kv_append(
    device: Device,
    *,
    qkv: Array,
    layout: QkvLayout,
    pages: Array,
    positions: Array,
    keys: Array,
    values: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
) -> None:
    """Round the keys and values of n tokens of one row to the cache's type and store them, codes with their scales.

    Shapes: qkv [n, layout.width] float32, rows may be further apart; pages [pages_per_row] int32, the row's page table;
            positions [n] int32; keys, values [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim], one layer's,
            in-out; key_scales, value_scales [num_pages, num_key_value_heads, PAGE_TOKENS] float32, in-out, beside codes
    Raises: ValueError
    """
    check_layout("kv_append", layout)
    stride = check_qkv("kv_append", qkv, layout)
    num_tokens = qkv.shape[0]
    check("kv_append", "pages", pages, dtype=np.int32, shape=(None,), aligned=4)
    check("kv_append", "positions", positions, dtype=np.int32, shape=(num_tokens,), aligned=4)
    check_cache("kv_append", keys, values, layout, key_scales, value_scales)
    vectors = 2 * layout.num_key_value_heads * _threads_a_head(layout.head_dim, keys.dtype.itemsize)
    device.launch(
        "kv_append",
        kernel_name(keys),
        grid=(num_tokens, -(-vectors // _BLOCK_SIZE)),
        block=_BLOCK_SIZE,
        arguments=(
            column_address(qkv, layout.k_offset),
            column_address(qkv, layout.v_offset),
            np.int32(stride),
            pages,
            positions,
            keys,
            values,
            key_scales,
            value_scales,
            np.int32(layout.num_key_value_heads),
        ),
        cost=lambda: kv_append_cost(num_tokens, layout, keys.dtype.itemsize),
    )


def kv_append_cost(num_tokens: int, layout: QkvLayout, itemsize: int) -> KernelCost:
    """What one call moves; `itemsize` is the cache's."""
    return KernelCost(8 * num_tokens * layout.kv_size, 2 * num_tokens * cached_bytes(layout, itemsize), 0)


def _threads_a_head(head_dim: int, itemsize: int) -> int:
    """One for each vector of 16 bytes, or of 8 codes, then rounded up to a power of two."""
    if not has_scales(itemsize):
        return head_dim * itemsize // 16
    return 1 << (head_dim // 8 - 1).bit_length()
