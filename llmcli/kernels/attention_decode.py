"""Launchers of append_tokens.cu and attention_decode.cu: norm, rotary, cache and attention of one new token a lane.

append_tokens takes the new tokens of prompts too, attention_decode those of a few lanes. attention_rings.py has the
kernels for more lanes.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check, int32s
from llmcli.kernels.launches import Launcher, Offset
from llmcli.kernels.phantom import assumed_values
from llmcli.kernels.qkv import (
    CACHE_TYPES,
    MIXED_DTYPES,
    PAGE_TOKENS,
    LayerCache,
    QkvLayout,
    cached_bytes,
    check_layout,
    check_qkv,
    check_window,
    has_scales,
    softmax_scale,
)
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_wide import ImageRows, check_image_rows

APPEND_SPEC = KernelSpec(
    "append_tokens",
    "norm, rotary and cache of a span's keys and values; norm and rotary of a prompt's queries",
    tuple(f"append_tokens<{kind}, {size}>" for kind in CACHE_TYPES.values() for size in (8, 64, 80, 128, 256)),
)

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
_WARPS = 4  # of a split; of a block of append_tokens
_MAX_SPLITS = 256  # combining costs a thread one round trip to L2 for every eight
_MIN_SPLIT_TOKENS = 128
# By head tile: up to this head_dim a multiprocessor attends to three splits at once, four with codes; above it to two.
_THREE_SPLITS_HEAD_DIM = {2: 0, 4: 64, 8: 128, 16: 0}
_WIDE_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class LaneInputs:
    """The new token of each lane, where it belongs, and its layer's norms, angles, window and cache.

    Row -1 marks an unused lane. A token sees as many tokens as the window has, itself included; without one, all.
    Shapes: qkv [R, layout.width] float32, raw projections, rows may be further apart; q_norm, k_norm [head_dim]
            float32 or None; cos_sin [max_seq_len, head_dim / 2, 2] float32 or None (a layer without rotary); rows,
            positions [R] int32; page_table [num_rows, pages_per_row] int32
    """

    qkv: Array
    layout: QkvLayout
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    cos_sin: Array | None
    rows: Array
    positions: Array
    page_table: Array
    cache: LayerCache
    window: int | None

    @property
    def num_lanes(self) -> int:
        """Lanes, also unused ones."""
        return self.qkv.shape[0]

    def of(self, lanes: slice) -> "LaneInputs":
        """Those of some lanes."""
        return replace(self, qkv=self.qkv[lanes], rows=self.rows[lanes], positions=self.positions[lanes])

    def seen(self) -> list[tuple[int, int]]:
        """The row of each used lane, and how many tokens it sees; for dry runs, which assume rows and positions."""
        lanes = zip(assumed_values(self.rows), assumed_values(self.positions), strict=True)
        return [(row, min(position + 1, self.window or position + 1)) for row, position in lanes if row >= 0]

    def check(self, kernel: str, *, cache_aligned: int | None = None) -> int:
        """Check everything; returns the columns from one row of `qkv` to the next. `cache_aligned`: see LayerCache.

        Raises: ValueError
        """
        check_layout(kernel, self.layout)
        stride = check_qkv(kernel, self.qkv, self.layout)
        num_lanes, head_dim = self.num_lanes, self.layout.head_dim
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                check(kernel, name, weight, dtype=np.float32, shape=(head_dim,))
        self.cache.check(kernel, self.layout, aligned=cache_aligned)
        check(kernel, "rows", self.rows, dtype=np.int32, shape=(num_lanes,), aligned=4)
        check(kernel, "positions", self.positions, dtype=np.int32, shape=(num_lanes,), aligned=4)
        check(kernel, "page_table", self.page_table, dtype=np.int32, shape=(None, None), aligned=4)
        if self.cos_sin is not None:
            check(kernel, "cos_sin", self.cos_sin, dtype=np.float32, shape=(None, head_dim // 2, 2))
            room = self.page_table.shape[1] * PAGE_TOKENS
            if self.cos_sin.shape[0] > room:
                raise ValueError(
                    f"{kernel}: cos_sin has {self.cos_sin.shape[0]} positions, a row's pages have room for {room}"
                )
        return stride

    def arguments(self, kernel: str, out: Array | ImageRows, *, copies_tiles: bool) -> tuple[Any, ...]:
        """Check everything; returns the first arguments of a kernel that attends, from `q` to `window`.

        A kernel that copies tiles of the cache takes the number of lanes, the other one the number of rows.
        Shapes: out [R, layout.q_size] float16 or float32
        Raises: ValueError
        """
        stride = self.check(kernel, cache_aligned=16 if copies_tiles else None)
        if isinstance(out, ImageRows):
            check_image_rows(kernel, out, self.layout.q_size, self.num_lanes)
        else:
            check(kernel, "out", out, dtype=MIXED_DTYPES, shape=(self.num_lanes, self.layout.q_size))
        num_rows, pages_per_row = self.page_table.shape
        return (
            *(self.qkv, Offset(self.qkv, 4 * self.layout.k_offset), Offset(self.qkv, 4 * self.layout.v_offset)),
            np.int32(stride),
            *(self.q_norm, self.k_norm, np.float32(self.eps), softmax_scale(self.layout), self.cos_sin),
            *(self.rows, self.positions, self.page_table),
            *int32s(self.num_lanes if copies_tiles else num_rows, pages_per_row),
            *self.cache.arrays,
            check_window(kernel, self.window),
        )


def append_tokens(
    device: Launcher,
    lanes: LaneInputs,
    *,
    parts: Array | None = None,
    norms_queries: bool = False,
    rotates_queries: bool = False,
) -> None:
    """Append a token to the cache in each lane, with the bits that attention_decode would append.

    First `parts` are added to `qkv`, in order: queries there become their sums, keys and values only in the cache.
    Queries there may also be normed, where they have a norm, and rotated, where there are angles.
    May start before the previous kernel has ended, and then reads rows, positions and
    page_table at once: that kernel must not write them, nor one that it overlaps.
    Shapes: parts float32 [num_parts, R, layout.width], for contiguous `qkv`
    Raises: ValueError
    """
    kernel, layout, num_lanes, num_parts = "append_tokens", lanes.layout, lanes.num_lanes, 0
    stride = lanes.check(kernel)
    if parts is not None:
        check(kernel, "qkv", lanes.qkv, dtype=np.float32, shape=(num_lanes, layout.width))
        check(kernel, "parts", parts, dtype=np.float32, shape=(None, num_lanes, layout.width))
        num_parts, stride = parts.shape[0], layout.width  # also for a single token, which has no next row
    q_norm = lanes.q_norm if norms_queries else None
    has_queries = num_parts > 0 or q_norm is not None or (rotates_queries and lanes.cos_sin is not None)
    num_query_heads = layout.num_attention_heads if has_queries else 0
    device.launch(
        kernel,
        f"append_tokens<{CACHE_TYPES[lanes.cache.dtype]}, {layout.head_dim}>",
        grid=(num_lanes, -(-(2 * layout.num_key_value_heads + num_query_heads) // _WARPS)),
        block=32 * _WARPS,
        arguments=(
            *(lanes.qkv, *int32s(layout.k_offset, layout.v_offset, stride), parts, np.int32(num_parts)),
            *(q_norm, lanes.k_norm, np.float32(lanes.eps), lanes.cos_sin),
            *(lanes.rows, lanes.positions, lanes.page_table, np.int32(lanes.page_table.shape[1])),
            *lanes.cache.arrays,
            *int32s(layout.num_key_value_heads, num_query_heads, rotates_queries),
        ),
        overlaps=True,
        cost=lambda: append_tokens_cost(num_lanes, layout, lanes.cache.dtype.itemsize, num_parts, has_queries),
    )


def append_tokens_cost(
    num_tokens: int, layout: QkvLayout, itemsize: int, num_parts: int = 0, has_queries: bool = False
) -> KernelCost:
    """What one call moves and adds; `itemsize` is the cache's. With parts it always has queries."""
    queries = num_tokens * layout.q_size if num_parts or has_queries else 0
    added = num_parts * (queries + 2 * num_tokens * layout.kv_size)
    read = 4 * (queries + 2 * num_tokens * layout.kv_size + added)
    return KernelCost(read, 4 * queries + 2 * num_tokens * cached_bytes(layout, itemsize), added)


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


def attention_decode(
    device: Launcher, lanes: LaneInputs, *, is_cached: bool, partials: Array, counters: Array, out: Array
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
    tile, heads = head_tile(layout, dtype.itemsize), grid_heads(layout, dtype.itemsize)
    num_splits = check_workspace(kernel, lanes, partials, counters, heads)
    # A block has a multiprocessor of its own if there is one for each head of each lane.
    alone = device.num_multiprocessors // (heads * lanes.num_lanes)
    splits = _splits_at_once(layout, dtype.itemsize) if alone else 1
    blocks_a_head = max(1, min(alone, num_splits))
    device.launch(
        kernel,
        f"attention_decode<{CACHE_TYPES[dtype]}, {layout.head_dim}, {tile}, {splits}>",
        grid=(max(-(-num_splits // splits), blocks_a_head), heads, lanes.num_lanes),
        block=32 * _WARPS * splits,
        arguments=(
            *arguments,
            *int32s(is_cached, layout.num_attention_heads, layout.num_key_value_heads, num_splits, blocks_a_head),
            *(partials, counters, out, np.int32(out.dtype == np.float32)),
        ),
        shared_bytes=4 * splits * _WARPS * tile * (layout.head_dim + 2),
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


def cost_of_lanes(lanes: LaneInputs, num_parts: int = 0) -> KernelCost:
    """What a call needs in a dry run."""
    seen = [num_seen for _, num_seen in lanes.seen()]
    return attention_decode_cost(seen, lanes.layout, lanes.cache.dtype.itemsize, num_parts)


def attention_decode_cost(num_seen: list[int], layout: QkvLayout, itemsize: int, num_parts: int = 0) -> KernelCost:
    """What one call needs; `num_seen` are the tokens each used lane sees, its own included.

    `num_parts`: those that attention_rows adds to queries, keys and values
    """
    cached, new = sum(seen - 1 for seen in num_seen), len(num_seen)
    queries = 4 * new * layout.q_size
    token_bytes = 2 * cached_bytes(layout, itemsize)
    return KernelCost(
        read_bytes=cached * token_bytes + (1 + num_parts) * (queries + 8 * new * layout.kv_size),
        written_bytes=queries // (1 if itemsize == 4 else 2) + new * token_bytes,
        flops=4 * (cached + new) * layout.q_size,
        stored_bytes=cached * token_bytes,
        element_bits=8 * itemsize,
    )
