"""Launcher of attention_rows.cu: attention_decode for many lanes, with its bits."""

import math
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, attention_decode_cost, head_tile
from llmcli.kernels.device import Device
from llmcli.kernels.phantom import assumed_values
from llmcli.kernels.qkv import (
    CACHE_TYPES,
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

MAX_LANES = 256
_WARPS = 4
_MAX_STAGES = 10


def stage_bytes(head_dim: int, itemsize: int) -> int:
    return 2 * PAGE_TOKENS * head_dim * itemsize + (8 * PAGE_TOKENS if has_scales(itemsize) else 0)


def fixed_bytes(layout: QkvLayout, itemsize: int, stages: int) -> int:
    head_dim, heads = layout.head_dim, head_tile(layout, itemsize)
    steps = -(-head_dim // 32)
    queries = 2 * 2 * heads * 32 * (steps | 1) * 2
    merging = 2 * 2 * 4 * 4 * heads + 64 * heads
    own = 8 * heads + 8 * head_dim
    barriers = 16 * stages + 32
    total = stages * stage_bytes(head_dim, itemsize) + queries + merging + own + 12 * MAX_LANES + barriers + 4
    return -(-total // 128) * 128


def head_bytes(head_dim: int) -> int:
    return 4 * (2 * 4 * (head_dim + 2) + 9 * head_dim + head_dim // 2)


def shared_bytes(layout: QkvLayout, itemsize: int, stages: int) -> int:
    heads = min(layout.group_size, head_tile(layout, itemsize))
    return fixed_bytes(layout, itemsize, stages) + heads * head_bytes(layout.head_dim)


def blocks_a_multiprocessor(layout: QkvLayout, itemsize: int) -> int:
    return 1 if layout.head_dim > 128 or head_tile(layout, itemsize) > 8 else 2


def choose_stages(layout: QkvLayout, itemsize: int, room: int) -> int:
    blocks = blocks_a_multiprocessor(layout, itemsize)
    a_block = (room + 1024) // blocks - 1024
    stages = 0
    while stages < _MAX_STAGES and shared_bytes(layout, itemsize, stages + 1) <= a_block:
        stages += 1
    return stages


def kernel_name(layout: QkvLayout, keys: Any, stages: int) -> str:
    itemsize = keys.dtype.itemsize
    return (
        f"attention_rows<{CACHE_TYPES[keys.dtype]}, {layout.head_dim}, {head_tile(layout, itemsize)}, {stages}, "
        f"{fixed_bytes(layout, itemsize, stages)}, {head_bytes(layout.head_dim)}>"
    )


def num_blocks(layout: QkvLayout, itemsize: int, num_multiprocessors: int) -> int:
    return blocks_a_multiprocessor(layout, itemsize) * num_multiprocessors


def partials_size(layout: QkvLayout, itemsize: int, num_multiprocessors: int, splits: int) -> int:
    heads = min(layout.group_size, head_tile(layout, itemsize))
    return num_blocks(layout, itemsize, num_multiprocessors) * heads * splits * (layout.head_dim + PARTIAL_EXTRA)


def attention_rows(
    device: Device,
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
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    window: int | None,
    is_cached: bool,
    max_splits: int,
    partials: Array,
    counters: Array,
    out: Array,
    stages: int | None = None,
    blocks: int | None = None,
) -> None:
    kernel = "attention_rows"
    check_layout(kernel, layout)
    stride = check_qkv(kernel, qkv, layout)
    num_lanes, itemsize, head_dim = qkv.shape[0], keys.dtype.itemsize, layout.head_dim
    check_cache(kernel, keys, values, layout, key_scales, value_scales)
    check_rotary(kernel, cos_sin, head_dim, check_lanes(kernel, num_lanes, rows, positions, page_table))
    stages = stages or choose_stages(layout, itemsize, device.shared_bytes_per_block)
    device.launch(
        kernel,
        kernel_name(layout, keys, stages),
        grid=((blocks or blocks_a_multiprocessor(layout, itemsize)) * device.num_multiprocessors,),
        block=32 * (_WARPS + 2),
        arguments=(
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
            np.int32(is_cached),
            np.int32(layout.num_attention_heads),
            np.int32(layout.num_key_value_heads),
            np.int32(max_splits),
            partials,
            counters,
            out,
        ),
        shared_bytes=shared_bytes(layout, itemsize, stages),
        overlaps=True,
        cost=lambda: attention_decode_cost(
            [
                min(position + 1, window or position + 1)
                for row, position in zip(assumed_values(rows), assumed_values(positions), strict=True)
                if row >= 0
            ],
            layout,
            itemsize,
        ),
    )
