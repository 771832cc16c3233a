"""Launcher of attention_prefill.cu: many new tokens of one row against everything cached up to each of them."""

import math

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_prefill_wgmma import attention_prefill_wgmma, takes
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import (
    CACHE_TYPES,
    PAGE_TOKENS,
    QkvLayout,
    cached_bytes,
    check_cache,
    check_layout,
    check_qkv,
    check_window,
    has_scales,
)
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "attention_prefill",
    "causal attention of many tokens",
    (
        *(f"attention_prefill<float, {size}>" for size in (48, 128, 256)),
        *(f"attention_prefill<__half, {size}>" for size in (8, 64, 96, 128, 256)),
        *(f"attention_prefill<__nv_bfloat16, {size}>" for size in (64, 80, 128, 256)),
        *(f"attention_prefill<KvCode, {size}>" for size in (8, 24, 64, 80, 96, 112, 128, 136, 256)),
    ),
)

_BLOCK_SIZE = 128


def kernel_name(keys: Array) -> str:
    """The name expression for this cache."""
    return f"attention_prefill<{CACHE_TYPES[keys.dtype]}, {keys.shape[3]}>"


def attention_prefill(
    device: Device,
    *,
    qkv: Array,
    layout: QkvLayout,
    keys: Array,
    values: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    pages: Array,
    start: int,
    window: int | None,
    out: Array,
) -> None:
    """Attend from n tokens of one row, the first at position `start`, whose keys and values are cached already.

    With a window a token sees only that many tokens, itself included. A token's bits do not depend on its chunk.
    Shapes: qkv [n, layout.width] float32, queries normed and rotated, rows may be further apart; keys, values
            [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim], one layer's; key_scales, value_scales [num_pages,
            num_key_value_heads, PAGE_TOKENS] float32 beside codes; pages [pages_per_row] int32, the row's page table;
            out [n, layout.q_size] float32
    Raises: ValueError
    """
    check_layout("attention_prefill", layout)
    stride = check_qkv("attention_prefill", qkv, layout)
    num_tokens = qkv.shape[0]
    check_cache("attention_prefill", keys, values, layout, key_scales, value_scales)
    check("attention_prefill", "pages", pages, dtype=np.int32, shape=(None,), aligned=4)
    check("attention_prefill", "out", out, dtype=np.float32, shape=(num_tokens, layout.q_size))
    room = pages.shape[0] * PAGE_TOKENS
    if start < 0 or start + num_tokens > room:
        raise ValueError(f"attention_prefill: tokens {start} to {start + num_tokens - 1} do not fit pages for {room}")
    visible = check_window("attention_prefill", window)
    scale = layout.head_dim**-0.5 * math.log2(math.e)

    def cost() -> KernelCost:
        return attention_prefill_cost(num_tokens, start, layout, keys.dtype.itemsize, window)

    if takes(device, layout, keys.dtype):
        attention_prefill_wgmma(
            device,
            qkv=qkv,
            q_stride=stride,
            layout=layout,
            keys=keys,
            values=values,
            pages=pages,
            start=start,
            window=int(visible),
            scale=scale,
            out=out,
            cost=cost,
        )
        return
    block_queries, shared_bytes = _block(layout.head_dim, keys.dtype.itemsize)
    device.launch(
        "attention_prefill",
        kernel_name(keys),
        grid=(layout.num_attention_heads, -(-num_tokens // block_queries)),
        block=_BLOCK_SIZE,
        arguments=(
            qkv,
            np.int32(stride),
            keys,
            values,
            key_scales,
            value_scales,
            pages,
            np.int32(layout.num_key_value_heads),
            np.int32(num_tokens),
            np.int32(start),
            visible,
            np.float32(scale),
            out,
        ),
        shared_bytes=shared_bytes,
        cost=cost,
    )


def _block(head_dim: int, itemsize: int) -> tuple[int, int]:
    """Queries and bytes of shared memory of a block, as prefill_mma.cuh and prefill_float.cuh lay them out."""
    if itemsize == 4:
        return 32, 4 * ((32 + 32) * (head_dim + 4) + 32 * 36)
    is_coded = has_scales(itemsize)
    queries = 128 if head_dim <= 128 else 64
    tokens = 64 if head_dim <= (96 if is_coded else 128) else 32
    padded = -(-head_dim // 16) * 16
    arriving = tokens * (padded + 2 * 4) if is_coded else 0
    return queries, 2 * (queries + 2 * tokens) * (padded + 8) + arriving


def attention_prefill_cost(
    num_tokens: int, start: int, layout: QkvLayout, itemsize: int, window: int | None
) -> KernelCost:
    """What one call needs at least: every visible token once, and the products that are not masked."""
    seen = sum(range(start + 1, start + num_tokens + 1))
    if window is not None:
        seen = sum(min(position + 1, window) for position in range(start, start + num_tokens))
    first = max(0, start + 1 - window) if window else 0
    cached = 2 * (start + num_tokens - first) * cached_bytes(layout, itemsize)
    queries = 4 * num_tokens * layout.q_size
    return KernelCost(queries + cached, queries, 4 * seen * layout.q_size, cached, 8 * itemsize)
