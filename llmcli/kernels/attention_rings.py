"""Launchers of attention_rows.cu and attention_span.cu: they do what attention_decode does, with the same bits.

attention_rows takes many lanes in one launch, attention_span several lanes of a row. Their blocks copy tiles of the
cache into rings in shared memory.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check, int32s
from llmcli.kernels.attention_decode import (
    PARTIAL_EXTRA,
    LaneInputs,
    attention_decode_cost,
    check_workspace,
    cost_of_lanes,
    head_tile,
)
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts, Launcher
from llmcli.kernels.qkv import CACHE_TYPES, PAGE_TOKENS, QkvLayout, cached_bytes, has_scales
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_wide import ImageRows

_WARPS = 4  # that attend; of attention_span a team
_MIN_STAGES = 4  # tiles in a ring; with fewer, warps wait for memory
_MAX_ROW_STAGES, _MAX_SPAN_STAGES = 10, 16  # tiles being copied in a block; more save nothing
# Above it, for head sizes not a multiple of 32, or with 16 heads a tile, registers fit one block of attention_rows a
# multiprocessor. Of attention_span they fit one narrow block above it, two for head sizes not a multiple of 32.
_WIDE_HEAD_DIM = 128
# Bytes that CUDA reserves for each block: the difference between a block's limit and a multiprocessor's memory.
_RESERVED_BYTES = 1024

MAX_LANES = 256  # in a launch of attention_rows
_ROWS_THREADS = 32 * (_WARPS + 3)  # one more warp copies, two prepare queries
_PARTS_AT_ONCE = 8
_WORK_BYTES = 4 * 4 * 11  # what the warps that attend know of four pieces

MAX_SPAN, MAX_SPAN_LANES = 8, 32  # lanes of one row, and of a launch of attention_span
NARROW, WIDE = 8, 32  # pairs of a lane and a query head that a block takes at most
_WIDE_FORM_HEAD_DIMS = (32, 64, 128)  # others need more registers than a wide block has


def room_for_block(card: CardFacts | Launcher, blocks: int) -> int:
    """Shared memory of a block where `blocks` of them share a multiprocessor."""
    return (card.shared_bytes_per_block + _RESERVED_BYTES) // blocks - _RESERVED_BYTES


def tile_bytes(layout: QkvLayout, itemsize: int) -> int:
    """Bytes of a page's keys and values of one head in shared memory."""
    return 2 * PAGE_TOKENS * layout.head_dim * itemsize + (8 * PAGE_TOKENS if has_scales(itemsize) else 0)


def query_bytes(layout: QkvLayout, num_queries: int) -> int:
    """Bytes of queries in shared memory, in two parts of 16 bits."""
    return 2 * num_queries * 2 * 32 * (-(-layout.head_dim // 32) | 1)


def lines(num_bytes: int) -> int:
    """Round up to lines of 128 bytes."""
    return -(-num_bytes // 128) * 128


class RowsPlan:
    """How one cache's attention is spread over a card; depends on nothing that changes after load.

    Attributes: stages: tiles being copied in a block; num_blocks: of every launch; head_tile: query heads a block
        takes; shared_bytes: dynamic shared memory of a block
    """

    def __init__(self, card: CardFacts | Launcher, layout: QkvLayout, itemsize: int):
        self._layout = layout
        self._itemsize = itemsize
        self.head_tile = head_tile(layout, itemsize)
        is_wide = layout.head_dim > _WIDE_HEAD_DIM or layout.head_dim % 32 != 0 or self.head_tile > 8
        for blocks in (1,) if is_wide else (2, 1):  # a multiprocessor
            self.num_blocks = blocks * card.num_multiprocessors
            room = room_for_block(card, blocks)
            self.stages = max((n for n in range(_MAX_ROW_STAGES + 1) if self._shared_bytes(n) <= room), default=0)
            if self.stages >= _MIN_STAGES:
                break
        self.shared_bytes = self._shared_bytes(self.stages)

    @property
    def is_possible(self) -> bool:
        """Whether the kernel takes this cache, and a block's shared memory is large enough."""
        return self._itemsize in (1, 2) and self.stages >= _MIN_STAGES

    @property
    def num_heads(self) -> int:
        """Query heads whose parts a block keeps."""
        return min(self._layout.group_size, self.head_tile)

    def partials_shape(self, num_splits: int) -> tuple[int, int, int, int]:
        """Shape of the memory for the parts of rows that several blocks share."""
        return self.num_blocks, self.num_heads, num_splits, self._layout.head_dim + PARTIAL_EXTRA

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """The name expression; its last parameters are sizes of shared memory, for the compiler to compare."""
        sizes = (self.head_tile, self.stages, self._fixed_bytes(self.stages), self._head_bytes)
        return f"attention_rows<{', '.join(map(str, (CACHE_TYPES[dtype], self._layout.head_dim, *sizes)))}>"

    @property
    def _head_bytes(self) -> int:
        """Bytes of a query head: two splits of all warps, eight parts of splits, and what is merged so far."""
        head_dim = self._layout.head_dim
        return 4 * (2 * _WARPS * (head_dim + 2) + (_PARTS_AT_ONCE + 1) * head_dim + head_dim // 2)

    def _fixed_bytes(self, stages: int) -> int:
        head_dim, heads = self._layout.head_dim, self.head_tile
        tiles = stages * tile_bytes(self._layout, self._itemsize)
        queries = query_bytes(self._layout, 2 * heads)
        merging = 2 * 2 * _WARPS * 4 * heads + _PARTS_AT_ONCE * 8 * heads + _WORK_BYTES
        own = 2 * 4 * (heads + head_dim)
        barriers = 8 * (2 * stages + 8)
        return lines(tiles + queries + merging + own + 3 * 4 * MAX_LANES + barriers + 4)

    def _shared_bytes(self, stages: int) -> int:
        return self._fixed_bytes(stages) + self.num_heads * self._head_bytes


def attention_rows(
    device: Launcher,
    lanes: LaneInputs,
    *,
    partials: Array,
    counters: Array,
    out: Array | ImageRows,
    parts: Array | None = None,
) -> None:
    """Do what attention_decode does, bit by bit, for up to MAX_LANES lanes. Keys and values have 16 bits, or are codes.

    Each row is cut into at most as many splits as `partials` has room for. If attention_decode's `partials` have the
    same room, both give a lane the same bits. With room for fewer blocks fewer are started. Outputs may go to an image.
    First `parts` are added to `qkv`, in order.
    Shapes: parts float32 [num_parts, R, layout.width], any distance apart; partials float32
            `RowsPlan.partials_shape(num_splits)` and counters uint32 [RowsPlan.num_blocks], which both may be for
            another number of blocks; others as in attention_decode
    Raises: ValueError, also where `RowsPlan.is_possible` is False
    """
    kernel, dtype = "attention_rows", lanes.cache.dtype
    if lanes.num_lanes > MAX_LANES:
        raise ValueError(f"{kernel}: takes {MAX_LANES} lanes at most, got {lanes.num_lanes}")
    arguments = lanes.arguments(kernel, out, copies_tiles=True)
    plan = RowsPlan(device, lanes.layout, dtype.itemsize)
    if not plan.is_possible:
        raise ValueError(f"{kernel}: does not take {lanes.layout} with a cache of {dtype} on this card")
    num_blocks, num_splits = partials.shape[0], partials.shape[2]
    check(kernel, "partials", partials, dtype=np.float32, shape=(None, *plan.partials_shape(num_splits)[1:]))
    check(kernel, "counters", counters, dtype=np.uint32, shape=(num_blocks,), aligned=4)
    if isinstance(out, ImageRows):
        written = out.image, *int32s(0, out.unit_inputs, out.first_token)
    else:
        written = out, *int32s(out.dtype == np.float32, 0, 0)
    added: tuple[Any, ...] = None, *int32s(0, 0)
    if parts is not None:
        check(kernel, "qkv", lanes.qkv, dtype=np.float32, shape=(lanes.num_lanes, lanes.layout.width))
        check(kernel, "parts", parts, dtype=np.float32, shape=(None, *lanes.qkv.shape), row_stride=True)
        added = parts, *int32s(parts.shape[0], parts.strides[0] // 4)
    device.launch(
        kernel,
        plan.kernel_name(dtype),
        grid=(min(plan.num_blocks, num_blocks),),
        block=_ROWS_THREADS,
        arguments=(
            *arguments,
            *int32s(lanes.layout.num_attention_heads, lanes.layout.num_key_value_heads, num_splits),
            *(partials, counters, *written, *added),
        ),
        shared_bytes=plan.shared_bytes,
        overlaps=True,
        cost=partial(cost_of_lanes, lanes, 0 if parts is None else parts.shape[0]),
    )


ROWS_SPEC = KernelSpec(
    "attention_rows",
    "attention_decode for many lanes in one launch",
    tuple(
        RowsPlan(TYPICAL_CARD, QkvLayout(group_size, 1, head_dim), np.dtype(kind).itemsize).kernel_name(np.dtype(kind))
        for kind, shapes in (
            (np.float16, ((4, 64), (4, 128), (2, 256), (16, 128))),
            (np.uint16, ((1, 80), (4, 128), (16, 64))),
            (np.uint8, ((4, 24), (4, 96), (4, 112), (4, 128), (2, 256), (16, 128))),
        )
        for group_size, head_dim in shapes
    ),
)


class SpanForm:
    """How a block works with one cache; depends on nothing that changes after load.

    Attributes: columns: pairs of a lane and a query head that it takes at most; num_threads: of it; blocks: on a
        multiprocessor; stages: tiles being copied in a block; shared_bytes: dynamic shared memory of a block
    """

    def __init__(self, card: CardFacts | Launcher, layout: QkvLayout, itemsize: int, columns: int):
        self._layout = layout
        self._itemsize = itemsize
        self.columns = columns
        teams, copiers = (1, 1) if columns == NARROW else (2, 4)
        self.num_threads = 32 * (teams * _WARPS + copiers)
        most = 1 if layout.head_dim > _WIDE_HEAD_DIM or columns == WIDE else 2 if layout.head_dim % 32 else 3
        for self.blocks in range(most, 0, -1):
            room = room_for_block(card, self.blocks)
            some = range(0, _MAX_SPAN_STAGES + 1, copiers)  # each stage has one copier: see copy_pieces
            self.stages = max((n for n in some if self._shared_bytes(n) <= room), default=0)
            if self.stages >= _MIN_STAGES:
                break
        self.shared_bytes = self._shared_bytes(self.stages)

    @property
    def is_possible(self) -> bool:
        """Whether there are enough registers, and enough shared memory for a block."""
        return self.stages >= _MIN_STAGES and (self.columns == NARROW or self._layout.head_dim in _WIDE_FORM_HEAD_DIMS)

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """The name expression; the last parameter but one is a size of shared memory, for the compiler to compare."""
        parameters = (CACHE_TYPES[dtype], self._layout.head_dim, self.columns, self.stages, self.shared_bytes)
        return f"attention_span<{', '.join(map(str, parameters))}, {self.blocks}>"

    def _shared_bytes(self, stages: int) -> int:
        head_dim, columns, tile = self._layout.head_dim, self.columns, tile_bytes(self._layout, self._itemsize)
        mixed = 4 * _WARPS * columns * (head_dim + 2)
        ring = lines(max(stages * tile, mixed if columns == NARROW else 0))
        merging = 16 if columns == NARROW else mixed
        walking = 8 * 2 * stages + 56 + (5 + 4) * 4 * MAX_SPAN_LANES + 3 * 4 + 8  # barriers, the piece, all rows
        own = 2 * 4 * MAX_SPAN * head_dim + 4 * columns
        of_columns = 2 * 4 * _WARPS * columns + 4 * 4 * columns
        # Sixteen columns lie as the tensor cores take them, without gaps.
        queries = query_bytes(self._layout, columns) if columns == NARROW else 4 * columns * -(-head_dim // 32) * 32
        return lines(ring + 2 * tile + queries + merging + walking + own + of_columns + 4)


class SpanPlan:
    """The forms of blocks for one cache."""

    def __init__(self, card: CardFacts | Launcher, layout: QkvLayout, itemsize: int):
        self._group_size = layout.group_size
        self._itemsize = itemsize
        self._num_multiprocessors = card.num_multiprocessors
        self._narrow, self._wide = (SpanForm(card, layout, itemsize, columns) for columns in (NARROW, WIDE))

    @property
    def is_possible(self) -> bool:
        """Whether the kernel takes this cache on this card."""
        return self._itemsize in (1, 2) and self._narrow.is_possible

    def form(self, most_lanes: int) -> SpanForm:
        """The form for rows of at most `most_lanes` lanes."""
        return self._wide if self._wide.is_possible and most_lanes * self._group_size > NARROW else self._narrow

    def num_blocks(self, form: SpanForm, most_lanes: int, num_rows: int, num_splits: int, num_heads: int) -> int:
        """Narrow blocks have at most one split each; wide ones, one on each multiprocessor, share the splits."""
        items = num_splits * num_heads * -(-most_lanes * self._group_size // NARROW) * num_rows
        return items if form.columns == NARROW else min(items, self._num_multiprocessors)


def attention_span(
    device: Launcher, lanes: LaneInputs, *, num_spans: int, partials: Array, counters: Array, out: Array
) -> None:
    """Do what attention_decode does for lanes of `num_spans` rows, each with up to MAX_SPAN neighbouring lanes.

    Each token sees the earlier ones of its row, and gets the bits of a call of its own. The lanes of a row have
    consecutive positions. Keys and values have 16 bits, or are codes.
    Shapes: as in attention_decode; counters uint32 [R or more, num_attention_heads]
    Raises: ValueError, also where `SpanPlan.is_possible` is False
    """
    kernel, num_lanes, layout, dtype = "attention_span", lanes.num_lanes, lanes.layout, lanes.cache.dtype
    if num_lanes > MAX_SPAN_LANES or not 1 <= num_spans <= num_lanes:
        most = f"takes 1 to {MAX_SPAN_LANES} lanes of as many rows at most"
        raise ValueError(f"{kernel}: {most}, got {num_lanes}, {num_spans}")
    arguments = lanes.arguments(kernel, out, copies_tiles=True)
    num_splits = check_workspace(kernel, lanes, partials, counters, layout.num_attention_heads)
    plan = SpanPlan(device, layout, dtype.itemsize)
    if not plan.is_possible:
        raise ValueError(f"{kernel}: does not take {layout} with a cache of {dtype} on this card")
    most_lanes = min(num_lanes - num_spans + 1, MAX_SPAN)
    form = plan.form(most_lanes)
    num_blocks = plan.num_blocks(form, most_lanes, num_spans, num_splits, layout.num_key_value_heads)
    shared_bytes = form.shared_bytes
    if num_blocks <= device.num_multiprocessors:  # alone on it, or several gather on the first free multiprocessor
        shared_bytes = max(shared_bytes, lines(room_for_block(device, 2) + 1))
    device.launch(
        kernel,
        form.kernel_name(dtype),
        grid=(num_blocks,),
        block=form.num_threads,
        arguments=(
            *arguments,
            *int32s(layout.num_attention_heads, layout.num_key_value_heads, num_splits),
            *(partials, counters, out, np.int32(out.dtype == np.float32)),
        ),
        shared_bytes=shared_bytes,
        overlaps=True,
        cost=lambda: attention_span_cost(lanes.seen(), layout, dtype.itemsize),
    )


def attention_span_cost(seen: list[tuple[int, int]], layout: QkvLayout, itemsize: int) -> KernelCost:
    """What one call needs; `seen` are the row of each used lane and the tokens that it sees, its own included."""
    alone = attention_decode_cost([tokens for _, tokens in seen], layout, itemsize)
    fewest: dict[int, int] = {}
    for row, tokens in seen:
        fewest[row] = min(tokens, fewest.get(row, tokens))
    once = sum(tokens - 1 for tokens in fewest.values()) * 2 * cached_bytes(layout, itemsize)
    return replace(alone, read_bytes=alone.read_bytes - alone.stored_bytes + once, stored_bytes=once)


SPAN_SPEC = KernelSpec(
    "attention_span",
    "attention_decode for several tokens a row, which read the cache once",
    tuple(
        SpanForm(TYPICAL_CARD, QkvLayout(1, 1, head_dim), np.dtype(kind).itemsize, columns).kernel_name(np.dtype(kind))
        for kind, columns, head_dims in (
            (np.float16, NARROW, (64, 128, 256)),
            (np.uint16, NARROW, (80, 128)),
            (np.uint8, NARROW, (24, 96, 128, 256)),
            (np.float16, WIDE, (64, 128)),
            (np.uint16, WIDE, (32, 128)),
            (np.uint8, WIDE, (64, 128)),
        )
        for head_dim in head_dims
    ),
)
