"""Launcher of attention_decode.cu: norm, rotary, cache and attention of one new token in each of a few lanes."""

import math
from dataclasses import dataclass

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.device import Device
from llmcli.kernels.phantom import assumed_values
from llmcli.kernels.qkv import (
    CACHE_TYPES,
    QkvLayout,
    cached_bytes,
    check_cache,
    check_lanes,
    check_layout,
    check_qkv,
    check_rotary,
    check_window,
    column_address,
    has_scales,
)
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "attention_decode",
    "norm, rotary, cache and attention of one token a lane",
    (
        "attention_decode<float, 48, 4, 3>",
        *(f"attention_decode<float, 64, 4, {splits}>" for splits in (1, 3)),
        "attention_decode<float, 128, 4, 2>",
        "attention_decode<float, 256, 2, 2>",
        *(f"attention_decode<__half, {size}, 8, 3>" for size in (8, 64, 96, 128)),
        *(f"attention_decode<__half, {size}, 8, 1>" for size in (64, 128, 256)),
        *(f"attention_decode<__nv_bfloat16, {size}, 8, 3>" for size in (64, 80, 128)),
        "attention_decode<__nv_bfloat16, 256, 8, 2>",
        *(f"attention_decode<{kind}, {size}, 16, 2>" for kind in ("__half", "__nv_bfloat16") for size in (64, 128)),
        *(f"attention_decode<KvCode, {size}, 8, 4>" for size in (8, 24, 64, 80, 96, 112, 128)),
        *(f"attention_decode<KvCode, {size}, 8, 1>" for size in (128, 256)),
        *(f"attention_decode<KvCode, {size}, 16, 2>" for size in (64, 128)),
    ),
)

PARTIAL_EXTRA = 4  # next to the weighted values: maximum, sum, and two floats that keep 16-byte alignment
_WARPS = 4  # of a split
_MAX_SPLITS = 256  # combining costs a thread one round trip to L2 for every eight
_MIN_SPLIT_TOKENS = 128
# By head tile: up to this head_dim a multiprocessor attends to three splits at once, four with codes; above it to two.
_THREE_SPLITS_HEAD_DIM = {2: 0, 4: 64, 8: 128, 16: 0}
_WIDE_HEAD_DIM = 128


def head_tile(layout: QkvLayout, itemsize: int) -> int:
    """Query heads that one block takes together; keys and values are read once for each tile of a group."""
    is_wide = layout.head_dim > _WIDE_HEAD_DIM  # fewer heads fit the registers
    if itemsize == 4:
        return 2 if is_wide else 4
    return 8 if is_wide or layout.group_size <= 8 else 16


def grid_heads(layout: QkvLayout, itemsize: int) -> int:
    """Blocks for each row and split; also the number of a row's counters."""
    return layout.num_key_value_heads * -(-layout.group_size // head_tile(layout, itemsize))


def _splits_at_once(layout: QkvLayout, itemsize: int) -> int:
    """Splits that a multiprocessor attends to; the function of the same name in the kernel."""
    if layout.head_dim > _THREE_SPLITS_HEAD_DIM[head_tile(layout, itemsize)]:
        return 2
    return 4 if has_scales(itemsize) else 3


def max_splits(num_multiprocessors: int, layout: QkvLayout, itemsize: int, max_seq_len: int) -> int:
    """The most splits of a row's tokens: one row fills the card once, and no split is very small.

    Depends on nothing that changes after load, and never on the number of rows, so that a row's bits do not either.
    """
    at_once, heads = _splits_at_once(layout, itemsize), grid_heads(layout, itemsize)
    # A multiprocessor attends to splits of one head.
    filling = at_once * (num_multiprocessors // heads) or at_once * num_multiprocessors // heads
    return max(1, min(filling, -(-max_seq_len // _MIN_SPLIT_TOKENS), _MAX_SPLITS))


def kernel_name(layout: QkvLayout, keys: Array, splits: int) -> str:
    """The name expression for these heads, this cache, and `splits` splits a block."""
    kind, tile = CACHE_TYPES[keys.dtype], head_tile(layout, keys.dtype.itemsize)
    return f"attention_decode<{kind}, {layout.head_dim}, {tile}, {splits}>"


def attention_decode(
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
    partials: Array,
    counters: Array,
    out: Array,
) -> None:
    """Attend from the new token of each lane to every token its window shows, after appending it to the cache.

    With `is_cached` append_tokens has appended the tokens of this call, and several lanes may be of one row: each sees
    the earlier ones, and gets the bits of a call of its own. Otherwise the rows must differ.
    Row -1 marks an unused lane: nothing of it is read or written, `out` included.
    `counters` holds zeros before the first call and after every call. May start before the previous kernel has ended,
    and then reads rows, positions, page_table and, unless `is_cached`, earlier tokens at once: that kernel must not
    write them, nor one that it overlaps.
    Shapes: qkv [R, layout.width] float32, raw projections, rows may be further apart; q_norm, k_norm [head_dim]
            float32 or None; cos_sin [max_seq_len, head_dim / 2, 2] float32 or None (a layer without rotary); rows,
            positions [R] int32; page_table [num_rows, pages_per_row] int32; keys, values [num_pages,
            num_key_value_heads, PAGE_TOKENS, head_dim], one layer's, in-out; key_scales, value_scales [num_pages,
            num_key_value_heads, PAGE_TOKENS] float32, in-out, with codes; partials [R or more, num_attention_heads,
            max_splits, head_dim + 4] float32; counters [R or more, grid_heads] uint32; out [R, layout.q_size] float32
    Raises: ValueError
    """
    kernel = "attention_decode"
    check_layout(kernel, layout)
    stride = check_qkv(kernel, qkv, layout)
    num_lanes, itemsize, head_dim = qkv.shape[0], keys.dtype.itemsize, layout.head_dim
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check(kernel, name, weight, dtype=np.float32, shape=(head_dim,))
    check_cache(kernel, keys, values, layout, key_scales, value_scales)
    check_rotary(kernel, cos_sin, head_dim, check_lanes(kernel, num_lanes, rows, positions, page_table))
    partials_shape = (None, layout.num_attention_heads, None, head_dim + PARTIAL_EXTRA)
    check(kernel, "partials", partials, dtype=np.float32, shape=partials_shape)
    check(kernel, "counters", counters, dtype=np.uint32, shape=(None, grid_heads(layout, itemsize)), aligned=4)
    check(kernel, "out", out, dtype=np.float32, shape=(num_lanes, layout.q_size))
    num_splits = partials.shape[2]
    # A block has a multiprocessor of its own if there is one for each head of each lane.
    alone = device.num_multiprocessors // (grid_heads(layout, itemsize) * num_lanes)
    splits = _splits_at_once(layout, itemsize) if alone else 1
    blocks_a_head = max(1, min(alone, num_splits))
    if min(partials.shape[0], counters.shape[0]) < num_lanes:
        raise ValueError(f"{kernel}: partials and counters are too small for {num_lanes} lanes")
    device.launch(
        kernel,
        kernel_name(layout, keys, splits),
        grid=(max(-(-num_splits // splits), blocks_a_head), grid_heads(layout, itemsize), num_lanes),
        block=32 * _WARPS * splits,
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
            np.int32(page_table.shape[0]),
            np.int32(page_table.shape[1]),
            keys,
            values,
            key_scales,
            value_scales,
            check_window(kernel, window),
            np.int32(is_cached),
            np.int32(layout.num_attention_heads),
            np.int32(layout.num_key_value_heads),
            np.int32(num_splits),
            np.int32(blocks_a_head),
            partials,
            counters,
            out,
        ),
        shared_bytes=4 * splits * _WARPS * head_tile(layout, itemsize) * (head_dim + 2),
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


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionCost(KernelCost):
    """The cost of a call that uses `num_rows` lanes."""

    num_rows: int


def attention_decode_cost(num_seen: list[int], layout: QkvLayout, itemsize: int) -> DecodeAttentionCost:
    """What one call needs; `num_seen` are the tokens each used lane sees, its own included."""
    cached = sum(seen - 1 for seen in num_seen)
    new = len(num_seen)
    queries = 4 * new * layout.q_size
    token_bytes = 2 * cached_bytes(layout, itemsize)
    return DecodeAttentionCost(
        read_bytes=cached * token_bytes + queries + 8 * new * layout.kv_size,
        written_bytes=queries + new * token_bytes,
        flops=4 * (cached + new) * layout.q_size,
        stored_bytes=cached * token_bytes,
        element_bits=8 * itemsize,
        num_rows=new,
    )
