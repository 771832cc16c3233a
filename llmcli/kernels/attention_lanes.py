"""What the launchers of attention over rows of a KV cache share: checks, first arguments, sizes of rings of tiles."""

import math
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import (
    PAGE_TOKENS,
    QkvLayout,
    check_cache,
    check_lanes,
    check_layout,
    check_qkv,
    check_rotary,
    check_window,
    column_address,
    has_scales,
)

MIN_STAGES = 4  # tiles in a ring; with fewer, warps wait for memory
_COPY_BYTES = 16
_LINE_BYTES = 128
# Bytes that CUDA reserves for each block: the difference between a block's limit and a multiprocessor's memory.
_RESERVED_BYTES = 1024


def lane_arguments(
    kernel: str,
    *,
    qkv: Array,
    layout: QkvLayout,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos_sin: Array | None,
    rows: Array,
    positions: Array,
    page_table: Array,
    keys: Array,
    values: Array,
    key_scales: Array | None,
    value_scales: Array | None,
    window: int | None,
    out: Array,
) -> tuple[Any, ...]:
    """Check the arguments of a kernel that copies tiles of the cache; return its first ones, from `q` to `window`.

    Raises: ValueError
    """
    check_layout(kernel, layout)
    stride = check_qkv(kernel, qkv, layout)
    num_lanes, head_dim = qkv.shape[0], layout.head_dim
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check(kernel, name, weight, dtype=np.float32, shape=(head_dim,))
    check_cache(kernel, keys, values, layout, key_scales, value_scales)
    for name, array in (("keys", keys), ("values", values)):
        check(kernel, name, array, dtype=keys.dtype, shape=keys.shape, aligned=_COPY_BYTES)
    check_rotary(kernel, cos_sin, head_dim, check_lanes(kernel, num_lanes, rows, positions, page_table))
    check(kernel, "out", out, dtype=np.float32, shape=(num_lanes, layout.q_size))
    return (
        qkv,
        column_address(qkv, layout.k_offset),
        column_address(qkv, layout.v_offset),
        np.int32(stride),
        q_norm,
        k_norm,
        np.float32(eps),
        np.float32(head_dim**-0.5 * math.log2(math.e)),
        cos_sin,
        rows,
        positions,
        page_table,
        np.int32(num_lanes),
        np.int32(page_table.shape[1]),
        keys,
        values,
        key_scales,
        value_scales,
        check_window(kernel, window),
    )


def room_for_block(card: CardFacts | Device, blocks: int) -> int:
    """Shared memory of a block where `blocks` of them share a multiprocessor."""
    return (card.shared_bytes_per_block + _RESERVED_BYTES) // blocks - _RESERVED_BYTES


def bytes_of_lone_block(card: CardFacts | Device) -> int:
    """Shared memory of a block that has a multiprocessor to itself."""
    return lines(room_for_block(card, 2) + 1)


def tile_bytes(layout: QkvLayout, itemsize: int) -> int:
    """Bytes of a page's keys and values of one head in shared memory."""
    return 2 * PAGE_TOKENS * layout.head_dim * itemsize + (8 * PAGE_TOKENS if has_scales(itemsize) else 0)


def query_bytes(layout: QkvLayout, num_queries: int) -> int:
    """Bytes of queries in shared memory, in two parts of 16 bits."""
    return 2 * num_queries * 2 * 32 * (-(-layout.head_dim // 32) | 1)


def lines(num_bytes: int) -> int:
    """Round up to lines of 128 bytes."""
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
