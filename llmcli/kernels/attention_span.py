"""Launcher of attention_span.cu: does what attention_decode does, where several lanes may belong to one row."""

from dataclasses import replace
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array
from llmcli.kernels.attention_decode import DecodeAttentionCost, attention_decode_cost, check_workspace
from llmcli.kernels.attention_lanes import (
    MIN_STAGES,
    LaneInputs,
    bytes_of_lone_block,
    lines,
    query_bytes,
    room_for_block,
    tile_bytes,
)
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.launches import Launcher
from llmcli.kernels.qkv import CACHE_TYPES, QkvLayout, cached_bytes
from llmcli.kernels.spec import KernelSpec

MAX_SPAN = 8  # lanes of one row
MAX_LANES = 32  # in a launch
NARROW, WIDE = 8, 32  # pairs of a lane and a query head that a block takes at most
_WARPS = 4  # of a team that attends
_MAX_STAGES = 16  # tiles being copied in a block; more save nothing
_WIDE_HEAD_DIM = 128  # above it registers fit one narrow block; for head sizes not a multiple of 32, two
_WIDE_FORM_HEAD_DIMS = (32, 64, 128)  # others need more registers than a wide block has


class SpanForm:
    """How a block works with one cache; depends on nothing that changes after load.

    Attributes: columns: pairs of a lane and a query head that it takes at most; blocks: on a multiprocessor; stages:
        tiles being copied in a block
    """

    def __init__(self, card: CardFacts | Launcher, layout: QkvLayout, itemsize: int, columns: int):
        self._layout = layout
        self._itemsize = itemsize
        self.columns = columns
        self._teams, self._copiers = (1, 1) if columns == NARROW else (2, 4)
        most = 1 if layout.head_dim > _WIDE_HEAD_DIM or columns == WIDE else 2 if layout.head_dim % 32 else 3
        for self.blocks in range(most, 0, -1):
            room = room_for_block(card, self.blocks)
            some = range(0, _MAX_STAGES + 1, self._copiers)  # each stage has one copier: see copy_pieces
            self.stages = max((n for n in some if self._shared_bytes(n) <= room), default=0)
            if self.stages >= MIN_STAGES:
                break

    @property
    def is_possible(self) -> bool:
        """Whether there are enough registers, and enough shared memory for a block."""
        return self.stages >= MIN_STAGES and (self.columns == NARROW or self._layout.head_dim in _WIDE_FORM_HEAD_DIMS)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._shared_bytes(self.stages)

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * (self._teams * _WARPS + self._copiers)

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """The name expression; the last parameter but one is a size of shared memory, for the compiler to compare."""
        parameters = (CACHE_TYPES[dtype], self._layout.head_dim, self.columns, self.stages, self.shared_bytes)
        return f"attention_span<{', '.join(map(str, parameters))}, {self.blocks}>"

    def _shared_bytes(self, stages: int) -> int:
        head_dim, columns, tile = self._layout.head_dim, self.columns, tile_bytes(self._layout, self._itemsize)
        mixed = 4 * _WARPS * columns * (head_dim + 2)
        ring = lines(max(stages * tile, mixed if columns == NARROW else 0))
        merging = 16 if columns == NARROW else mixed
        walking = 8 * 2 * stages + 56 + (5 + 4) * 4 * MAX_LANES + 3 * 4 + 8  # barriers, the piece, all rows
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
    device: Launcher,
    lanes: LaneInputs,
    *,
    num_spans: int,
    partials: Array,
    counters: Array,
    out: Array,
) -> None:
    """Do what attention_decode does for lanes of `num_spans` rows, each with up to MAX_SPAN neighbouring lanes.

    Each token sees the earlier ones of its row, and gets the bits of a call of its own. The lanes of a row have
    consecutive positions. Keys and values have 16 bits, or are codes.
    Shapes: as in attention_decode; counters uint32 [R or more, num_attention_heads]
    Raises: ValueError, also where `SpanPlan.is_possible` is False
    """
    kernel, num_lanes, layout, dtype = "attention_span", lanes.num_lanes, lanes.layout, lanes.cache.dtype
    if num_lanes > MAX_LANES or not 1 <= num_spans <= num_lanes:
        raise ValueError(
            f"{kernel}: takes 1 to {MAX_LANES} lanes of as many rows at most, got {num_lanes}, {num_spans}"
        )
    arguments = lanes.arguments(kernel, out, copies_tiles=True)
    num_splits = check_workspace(kernel, lanes, partials, counters, layout.num_attention_heads)
    plan = SpanPlan(device, layout, dtype.itemsize)
    if not plan.is_possible:
        raise ValueError(f"{kernel}: does not take {layout} with a cache of {dtype} on this card")
    most_lanes = min(num_lanes - num_spans + 1, MAX_SPAN)
    form = plan.form(most_lanes)
    num_blocks = plan.num_blocks(form, most_lanes, num_spans, num_splits, layout.num_key_value_heads)
    shared_bytes = form.shared_bytes
    if num_blocks <= device.num_multiprocessors:  # else several gather on the first free multiprocessor
        shared_bytes = max(shared_bytes, bytes_of_lone_block(device))
    device.launch(
        kernel,
        form.kernel_name(dtype),
        grid=(num_blocks,),
        block=form.num_threads,
        arguments=(
            *arguments,
            np.int32(layout.num_attention_heads),
            np.int32(layout.num_key_value_heads),
            np.int32(num_splits),
            partials,
            counters,
            out,
            np.int32(out.dtype == np.float32),
        ),
        shared_bytes=shared_bytes,
        overlaps=True,
        cost=lambda: attention_span_cost(lanes.seen(), layout, dtype.itemsize),
    )


def attention_span_cost(seen: list[tuple[int, int]], layout: QkvLayout, itemsize: int) -> DecodeAttentionCost:
    """What one call needs; `seen` are the row of each used lane and the tokens that it sees, its own included."""
    alone = attention_decode_cost([tokens for _, tokens in seen], layout, itemsize)
    fewest: dict[int, int] = {}
    for row, tokens in seen:
        fewest[row] = min(tokens, fewest.get(row, tokens))
    once = sum(tokens - 1 for tokens in fewest.values()) * 2 * cached_bytes(layout, itemsize)
    read_bytes = alone.read_bytes - alone.stored_bytes + once
    return replace(alone, read_bytes=read_bytes, stored_bytes=once, num_rows=len(fewest))


SPEC = KernelSpec(
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
