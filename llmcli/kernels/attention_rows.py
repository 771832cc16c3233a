"""Launcher of attention_rows.cu: does what attention_decode does, with the same bits, for many lanes in one launch."""

from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, cost_of_lanes, head_tile
from llmcli.kernels.attention_lanes import (
    MIN_STAGES,
    LaneInputs,
    lines,
    query_bytes,
    room_for_block,
    tile_bytes,
)
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.launches import Launcher
from llmcli.kernels.qkv import CACHE_TYPES, QkvLayout
from llmcli.kernels.spec import KernelSpec
from llmcli.kernels.stage_wide import ImageRows

MAX_LANES = 256  # in a launch
_WARPS = 4  # that attend; one more copies, two prepare queries
_THREADS = 32 * (_WARPS + 3)
_PARTS_AT_ONCE = 8
_WORK_BYTES = 4 * 4 * 11  # what the warps that attend know of four pieces
_MAX_STAGES = 10  # tiles being copied in a block; more save nothing
# Above it, for head sizes not a multiple of 32, or with 16 heads a tile, registers fit one block a multiprocessor.
_WIDE_HEAD_DIM = 128


class RowsPlan:
    """How one cache's attention is spread over a card; depends on nothing that changes after load.

    Attributes: stages: tiles being copied in a block; num_blocks: of every launch; head_tile: query heads a block takes
    """

    def __init__(self, card: CardFacts | Launcher, layout: QkvLayout, itemsize: int):
        self._layout = layout
        self._itemsize = itemsize
        self.head_tile = head_tile(layout, itemsize)
        is_wide = layout.head_dim > _WIDE_HEAD_DIM or layout.head_dim % 32 != 0 or self.head_tile > 8
        for blocks in (1,) if is_wide else (2, 1):  # a multiprocessor
            self.num_blocks = blocks * card.num_multiprocessors
            room = room_for_block(card, blocks)
            self.stages = max((n for n in range(_MAX_STAGES + 1) if self._shared_bytes(n) <= room), default=0)
            if self.stages >= MIN_STAGES:
                break

    @property
    def is_possible(self) -> bool:
        """Whether the kernel takes this cache, and a block's shared memory is large enough."""
        return self._itemsize in (1, 2) and self.stages >= MIN_STAGES

    @property
    def num_heads(self) -> int:
        """Query heads whose parts a block keeps."""
        return min(self._layout.group_size, self.head_tile)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._shared_bytes(self.stages)

    def partials_shape(self, num_splits: int) -> tuple[int, int, int, int]:
        """Shape of the memory for the parts of rows that several blocks share."""
        return self.num_blocks, self.num_heads, num_splits, self._layout.head_dim + PARTIAL_EXTRA

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """The name expression; its last parameters are sizes of shared memory, for the compiler to compare."""
        parameters = (
            CACHE_TYPES[dtype],
            str(self._layout.head_dim),
            str(self.head_tile),
            str(self.stages),
            str(self._fixed_bytes(self.stages)),
            str(self._head_bytes),
        )
        return f"attention_rows<{', '.join(parameters)}>"

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
        written = out.image, np.int32(0), np.int32(out.unit_inputs), np.int32(out.first_token)
    else:
        written = out, np.int32(out.dtype == np.float32), np.int32(0), np.int32(0)
    added: tuple[Any, ...] = None, np.int32(0), np.int32(0)
    if parts is not None:
        check(kernel, "qkv", lanes.qkv, dtype=np.float32, shape=(lanes.num_lanes, lanes.layout.width))
        check(kernel, "parts", parts, dtype=np.float32, shape=(None, *lanes.qkv.shape), row_stride=True)
        added = parts, np.int32(parts.shape[0]), np.int32(parts.strides[0] // 4)
    device.launch(
        kernel,
        plan.kernel_name(dtype),
        grid=(min(plan.num_blocks, num_blocks),),
        block=_THREADS,
        arguments=(
            *arguments,
            np.int32(lanes.layout.num_attention_heads),
            np.int32(lanes.layout.num_key_value_heads),
            np.int32(num_splits),
            partials,
            counters,
            *written,
            *added,
        ),
        shared_bytes=plan.shared_bytes,
        overlaps=True,
        cost=partial(cost_of_lanes, lanes, 0 if parts is None else parts.shape[0]),
    )


SPEC = KernelSpec(
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
