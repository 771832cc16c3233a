"""Launcher of attention_decode.cu: norm, rotary, cache and attention of one new token in each of a few lanes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_lanes import LaneInputs
from llmcli.kernels.launches import Launcher
from llmcli.kernels.qkv import CACHE_TYPES, QkvLayout, cached_bytes, has_scales
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


def kernel_name(layout: QkvLayout, dtype: np.dtype[Any], splits: int) -> str:
    """The name expression for these heads, this cache, and `splits` splits a block."""
    kind, tile = CACHE_TYPES[dtype], head_tile(layout, dtype.itemsize)
    return f"attention_decode<{kind}, {layout.head_dim}, {tile}, {splits}>"


def attention_decode(
    device: Launcher,
    lanes: LaneInputs,
    *,
    is_cached: bool,
    partials: Array,
    counters: Array,
    out: Array,
) -> None:
    """Attend from the new token of each lane to every token its window shows, after appending it to the cache.

    With `is_cached` append_tokens has appended the tokens of this call, and several lanes may be of one row: each sees
    the earlier ones, and gets the bits of a call of its own. Otherwise the rows must differ.
    Nothing of an unused lane is read or written, `out` included.
    `counters` holds zeros before the first call and after every call. May start before the previous kernel has ended,
    and then reads rows, positions, page_table and, unless `is_cached`, earlier tokens at once: that kernel must not
    write them, nor one that it overlaps.
    Shapes: partials [R or more, num_attention_heads, max_splits, head_dim + 4] float32; counters [R or more,
            grid_heads] uint32; out [R, layout.q_size] float16 or float32
    Raises: ValueError
    """
    kernel, layout, dtype = "attention_decode", lanes.layout, lanes.cache.dtype
    arguments = lanes.arguments(kernel, out, copies_tiles=False)
    heads = grid_heads(layout, dtype.itemsize)
    num_splits = check_workspace(kernel, lanes, partials, counters, heads)
    # A block has a multiprocessor of its own if there is one for each head of each lane.
    alone = device.num_multiprocessors // (heads * lanes.num_lanes)
    splits = _splits_at_once(layout, dtype.itemsize) if alone else 1
    blocks_a_head = max(1, min(alone, num_splits))
    device.launch(
        kernel,
        kernel_name(layout, dtype, splits),
        grid=(max(-(-num_splits // splits), blocks_a_head), heads, lanes.num_lanes),
        block=32 * _WARPS * splits,
        arguments=(
            *arguments,
            np.int32(is_cached),
            np.int32(layout.num_attention_heads),
            np.int32(layout.num_key_value_heads),
            np.int32(num_splits),
            np.int32(blocks_a_head),
            partials,
            counters,
            out,
            np.int32(out.dtype == np.float32),
        ),
        shared_bytes=4 * splits * _WARPS * head_tile(layout, dtype.itemsize) * (layout.head_dim + 2),
        overlaps=True,
        cost=partial(cost_of_lanes, lanes),
    )


def check_workspace(kernel: str, lanes: LaneInputs, partials: Array, counters: Array, lane_counters: int) -> int:
    """Check the memory for parts of splits, with `lane_counters` counters a lane; returns the splits it has room for.

    Raises: ValueError
    """
    shape = (None, lanes.layout.num_attention_heads, None, lanes.layout.head_dim + PARTIAL_EXTRA)
    check(kernel, "partials", partials, dtype=np.float32, shape=shape)
    check(kernel, "counters", counters, dtype=np.uint32, shape=(None, lane_counters), aligned=4)
    if min(partials.shape[0], counters.shape[0]) < lanes.num_lanes:
        raise ValueError(f"{kernel}: partials and counters are too small for {lanes.num_lanes} lanes")
    return partials.shape[2]


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionCost(KernelCost):
    """The cost of a call that uses `num_rows` lanes."""

    num_rows: int


def cost_of_lanes(lanes: LaneInputs, num_parts: int = 0) -> DecodeAttentionCost:
    """What a call needs in a dry run."""
    seen = [num_seen for _, num_seen in lanes.seen()]
    return attention_decode_cost(seen, lanes.layout, lanes.cache.dtype.itemsize, num_parts)


def attention_decode_cost(
    num_seen: list[int], layout: QkvLayout, itemsize: int, num_parts: int = 0
) -> DecodeAttentionCost:
    """What one call needs; `num_seen` are the tokens each used lane sees, its own included.

    `num_parts`: those that attention_rows adds to queries, keys and values
    """
    cached = sum(seen - 1 for seen in num_seen)
    new = len(num_seen)
    queries = 4 * new * layout.q_size
    token_bytes = 2 * cached_bytes(layout, itemsize)
    return DecodeAttentionCost(
        read_bytes=cached * token_bytes + (1 + num_parts) * (queries + 8 * new * layout.kv_size),
        written_bytes=queries // (1 if itemsize == 4 else 2) + new * token_bytes,
        flops=4 * (cached + new) * layout.q_size,
        stored_bytes=cached * token_bytes,
        element_bits=8 * itemsize,
        num_rows=new,
    )
