"""Launcher of attention_span.cu: what attention_decode does, for lanes of which several belong to one row."""

from dataclasses import replace
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, DecodeAttentionCost, attention_decode_cost
from llmcli.kernels.attention_lanes import (
    MIN_STAGES,
    lane_arguments,
    lines,
    query_bytes,
    room_for_block,
    tile_bytes,
)
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.phantom import assumed_values
from llmcli.kernels.qkv import CACHE_TYPES, QkvLayout, cached_bytes
from llmcli.kernels.spec import KernelSpec

MAX_SPAN = 8  # lanes of one row
MAX_LANES = 32  # in a launch
_COLUMNS = 8  # pairs of a lane and a query head that a block takes
_WARPS = 4  # that attend; one more copies
_MAX_STAGES = 16  # tiles under way in a block; more bring nothing
_WIDE_HEAD_DIM = 128  # above it registers have room for one block; for head sizes of no whole 32 for two, else three


class SpanPlan:
    """How a block works with one cache; depends on nothing that changes after load.

    Attributes: blocks: on a multiprocessor; stages: tiles under way in a block
    """

    def __init__(self, card: CardFacts | Device, layout: QkvLayout, itemsize: int):
        self._layout = layout
        self._itemsize = itemsize
        most = 1 if layout.head_dim > _WIDE_HEAD_DIM else 2 if layout.head_dim % 32 else 3
        for self.blocks in range(most, 0, -1):
            room = room_for_block(card, self.blocks)
            self.stages = max((n for n in range(_MAX_STAGES + 1) if self._shared_bytes(n) <= room), default=0)
            if self.stages >= MIN_STAGES:
                break

    @property
    def is_possible(self) -> bool:
        """Whether the kernel is for this cache, and a block's shared memory has room for it."""
        return self._itemsize in (1, 2) and self.stages >= MIN_STAGES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._shared_bytes(self.stages)

    def grid_heads(self, most_lanes: int) -> int:
        """Blocks that a split of a row takes, if it has so many lanes at most."""
        return self._layout.num_key_value_heads * -(-most_lanes * self._layout.group_size // _COLUMNS)

    def num_counters(self, num_lanes: int) -> int:
        """Counters for so many lanes of any rows."""
        return max(spans * self.grid_heads(num_lanes - spans + 1) for spans in range(1, num_lanes + 1))

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """The name expression; the last parameters but one is a size of shared memory, for the compiler to compare."""
        parameters = (
            CACHE_TYPES[dtype],
            str(self._layout.head_dim),
            str(self.stages),
            str(self.shared_bytes),
            str(self.blocks),
        )
        return f"attention_span<{', '.join(parameters)}>"

    def _shared_bytes(self, stages: int) -> int:
        head_dim, columns = self._layout.head_dim, _COLUMNS
        tile = tile_bytes(self._layout, self._itemsize)
        ring = lines(max(stages * tile, 4 * _WARPS * columns * (head_dim + 2)))
        queries = query_bytes(self._layout, columns)
        own = 2 * 4 * MAX_SPAN * head_dim + 4 * columns
        merging = 2 * 4 * _WARPS * columns + 5 * 4 * MAX_SPAN + 9 * columns + 9 * 4
        barriers = 8 * (2 * stages + 1)
        return lines(ring + 2 * tile + queries + own + merging + barriers + 4)


def attention_span(
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
    num_spans: int,
    partials: Array,
    counters: Array,
    out: Array,
) -> None:
    """Do what attention_decode does for lanes of `num_spans` rows, each with up to MAX_SPAN neighbouring lanes.

    Each token sees those of its row in front of it, and gets the bits that it would get in a call of its own. The rows
    have consecutive positions. Keys and values have 16 bits, or are codes.
    Shapes: as in attention_decode; counters uint32 [`SpanPlan.num_counters`]
    Raises: ValueError, also where `SpanPlan.is_possible` is False
    """
    kernel = "attention_span"
    num_lanes, itemsize = qkv.shape[0], keys.dtype.itemsize
    if num_lanes > MAX_LANES or not 1 <= num_spans <= num_lanes:
        raise ValueError(
            f"{kernel}: takes 1 to {MAX_LANES} lanes of as many rows at most, got {num_lanes}, {num_spans}"
        )
    arguments = lane_arguments(
        kernel,
        qkv=qkv,
        layout=layout,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        cos_sin=cos_sin,
        rows=rows,
        positions=positions,
        page_table=page_table,
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        window=window,
        out=out,
    )
    partials_shape = (None, layout.num_attention_heads, None, layout.head_dim + PARTIAL_EXTRA)
    check(kernel, "partials", partials, dtype=np.float32, shape=partials_shape)
    check(kernel, "counters", counters, dtype=np.uint32, shape=(None,), aligned=4)
    plan = SpanPlan(device, layout, itemsize)
    if not plan.is_possible:
        raise ValueError(f"{kernel}: does not take {layout} with a cache of {keys.dtype} on this card")
    grid_heads = plan.grid_heads(min(num_lanes - num_spans + 1, MAX_SPAN))
    if partials.shape[0] < num_lanes or counters.shape[0] < num_spans * grid_heads:
        raise ValueError(f"{kernel}: partials and counters are too small for {num_lanes} lanes")

    def cost() -> DecodeAttentionCost:
        seen: dict[int, list[int]] = {}
        for row, position in zip(assumed_values(rows), assumed_values(positions), strict=True):
            if row >= 0:
                seen.setdefault(row, []).append(min(position + 1, window or position + 1))
        return attention_span_cost(list(seen.values()), layout, itemsize)

    device.launch(
        kernel,
        plan.kernel_name(keys.dtype),
        grid=(partials.shape[2], grid_heads, num_spans),
        block=32 * (_WARPS + 1),
        arguments=(
            *arguments,
            np.int32(layout.num_attention_heads),
            np.int32(layout.num_key_value_heads),
            partials,
            counters,
            out,
        ),
        shared_bytes=plan.shared_bytes,
        overlaps=True,
        cost=cost,
    )


def attention_span_cost(seen: list[list[int]], layout: QkvLayout, itemsize: int) -> DecodeAttentionCost:
    """What one call needs; `seen` are the tokens that each lane of each row sees, its own included."""
    alone = attention_decode_cost([tokens for of_row in seen for tokens in of_row], layout, itemsize)
    once = sum(min(of_row) - 1 for of_row in seen) * 2 * cached_bytes(layout, itemsize)
    read_bytes = alone.read_bytes - alone.stored_bytes + once
    return replace(alone, read_bytes=read_bytes, stored_bytes=once, num_rows=len(seen))


SPEC = KernelSpec(
    "attention_span",
    "attention_decode for several tokens a row, which read the cache once",
    tuple(
        SpanPlan(TYPICAL_CARD, QkvLayout(group_size, 1, head_dim), np.dtype(kind).itemsize).kernel_name(np.dtype(kind))
        for kind, shapes in (
            (np.float16, ((4, 64), (4, 128), (2, 256))),
            (np.uint16, ((1, 80), (4, 128))),
            (np.uint8, ((1, 24), (4, 96), (4, 128), (2, 256))),
        )
        for group_size, head_dim in shapes
    ),
)
