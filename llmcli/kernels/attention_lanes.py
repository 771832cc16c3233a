"""`LaneInputs`: what kernels take that append and attend lane by lane. Also the sizes of their rings of tiles."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.launches import Launcher, Offset
from llmcli.kernels.phantom import assumed_values
from llmcli.kernels.qkv import (
    MIXED_DTYPES,
    PAGE_TOKENS,
    LayerCache,
    QkvLayout,
    check_layout,
    check_qkv,
    check_window,
    has_scales,
    softmax_scale,
)
from llmcli.kernels.stage_wide import ImageRows, check_image_rows

MIN_STAGES = 4  # tiles in a ring; with fewer, warps wait for memory
_COPY_BYTES = 16
_LINE_BYTES = 128
# Bytes that CUDA reserves for each block: the difference between a block's limit and a multiprocessor's memory.
_RESERVED_BYTES = 1024


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
        stride = self.check(kernel, cache_aligned=_COPY_BYTES if copies_tiles else None)
        if isinstance(out, ImageRows):
            check_image_rows(kernel, out, self.layout.q_size, self.num_lanes)
        else:
            check(kernel, "out", out, dtype=MIXED_DTYPES, shape=(self.num_lanes, self.layout.q_size))
        num_rows, pages_per_row = self.page_table.shape
        return (
            self.qkv,
            Offset(self.qkv, 4 * self.layout.k_offset),
            Offset(self.qkv, 4 * self.layout.v_offset),
            np.int32(stride),
            self.q_norm,
            self.k_norm,
            np.float32(self.eps),
            softmax_scale(self.layout),
            self.cos_sin,
            self.rows,
            self.positions,
            self.page_table,
            np.int32(self.num_lanes if copies_tiles else num_rows),
            np.int32(pages_per_row),
            *self.cache.arrays,
            check_window(kernel, self.window),
        )


def room_for_block(card: CardFacts | Launcher, blocks: int) -> int:
    """Shared memory of a block where `blocks` of them share a multiprocessor."""
    return (card.shared_bytes_per_block + _RESERVED_BYTES) // blocks - _RESERVED_BYTES


def bytes_of_lone_block(card: CardFacts | Launcher) -> int:
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
