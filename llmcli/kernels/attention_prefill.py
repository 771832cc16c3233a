"""Launcher of attention_prefill.cu and attention_prefill_wgmma.cu: attention of many new tokens of one row.

They attend to all cached tokens up to each of them. The second kernel is for cards with wgmma.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, check, int32s, struct_fields
from llmcli.kernels.launches import Launcher
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
from llmcli.kernels.spec import Cost, KernelCost, KernelSpec
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows, check_image_rows

SPEC = KernelSpec(
    "attention_prefill",
    "causal attention of many tokens",
    (
        *(f"attention_prefill<float, {size}>" for size in (48, 128, 256)),
        *(f"attention_prefill<__half, {size}>" for size in (8, 64, 96, 128, 256)),
        *(f"attention_prefill<__nv_bfloat16, {size}>" for size in (64, 80, 128, 256)),
        *(f"attention_prefill<KvCode, {size}>" for size in (8, 24, 64, 80, 96, 112, 128, 136, 256)),
    ),
)

_BLOCK_SIZE = 128

WGMMA_HEAD_DIM = 128
_GROUP_ROWS = 64  # of a group of four warps


@dataclass(frozen=True)
class WgmmaForm:
    """A form of the kernel with wgmma. All forms give the same bits.

    `consumers`: groups of warps that share keys and values; `stages`: tiles of these in shared memory; `tokens`: of a
    tile. A form with tiles of fewer than 128 tokens takes rows whose tokens fit its first tile.
    """

    consumers: int
    stages: int
    tokens: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * 2 * self.tokens * WGMMA_HEAD_DIM * 2


_SHORT_FORMS = WgmmaForm(1, 1, 16), WgmmaForm(1, 1, 64)
_ALONE, _SHARED = WgmmaForm(1, 3, 128), WgmmaForm(2, 3, 128)


class PrefillShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = struct_fields(
        "q_stride num_key_value_heads group_size num_tokens num_tiles start window first_token out_is_float", "scale"
    )


def wgmma_name(dtype: np.dtype[np.generic], form: WgmmaForm, unit_inputs: int) -> str:
    """The name expression; `unit_inputs` are those of an image, 0 for rows of floats."""
    sizes = f"{form.consumers}, {form.stages}, {unit_inputs}, {form.tokens}"
    return f"attention_prefill_wgmma<{C_TYPES[dtype]}, {sizes}>"


def rotates_queries(device: Launcher, layout: QkvLayout, dtype: np.dtype[Any]) -> bool:
    """Whether `attention_prefill` takes `cos_sin` on this card, for a cache of this type.

    If so, it uses wgmma. The number of tokens must not matter: bits depend on it.
    """
    return device.can_wgmma and layout.head_dim == WGMMA_HEAD_DIM and dtype.itemsize == 2


def writes_images(device: Launcher, layout: QkvLayout, dtype: np.dtype[Any]) -> bool:
    """Whether its `out` may be rows of an image."""
    return rotates_queries(device, layout, dtype) and _makes_images(dtype)


def _makes_images(dtype: np.dtype[Any]) -> bool:
    """Whether wgmma may write fp16 without scales: means of such values are as small as the values."""
    return dtype == np.float16


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """New tokens of one row, the first at position `start`, whose keys and values are cached already.

    With a window a token sees only that many tokens, itself included. With `cos_sin` queries are rotated first.
    Shapes: qkv [n, layout.width] float32, queries normed and rotated, rows may be further apart; pages [pages_per_row]
            int32, the row's page table; cos_sin [max_seq_len, head_dim / 2, 2] float32
    """

    qkv: Array
    layout: QkvLayout
    cache: LayerCache
    pages: Array
    start: int
    window: int | None
    cos_sin: Array | None = None

    @property
    def num_tokens(self) -> int:
        """The new tokens."""
        return self.qkv.shape[0]

    @property
    def end(self) -> int:
        """The row's tokens after them."""
        return self.start + self.num_tokens


def attention_prefill(device: Launcher, inputs: PromptInputs, out: Array | ImageRows) -> None:
    """Attend from each token. A token's bits do not depend on its chunk.

    Rows of an image have no scales. Some cards and caches lack these and `cos_sin`.
    Shapes: out [n, layout.q_size] float16 or float32, or rows of an image
    Raises: ValueError, also where `rotates_queries` or `writes_images` is False
    """
    kernel, layout, dtype = "attention_prefill", inputs.layout, inputs.cache.dtype
    check_layout(kernel, layout)
    stride = check_qkv(kernel, inputs.qkv, layout)
    inputs.cache.check(kernel, layout)
    check(kernel, "pages", inputs.pages, dtype=np.int32, shape=(None,), aligned=4)
    if isinstance(out, ImageRows):
        if not writes_images(device, layout, dtype):
            raise ValueError(f"{kernel}: writes no images from a cache of {dtype} with {layout}")
        check_image_rows(kernel, out, layout.q_size, inputs.num_tokens)
    else:
        check(kernel, "out", out, dtype=MIXED_DTYPES, shape=(inputs.num_tokens, layout.q_size))
    room = inputs.pages.shape[0] * PAGE_TOKENS
    if inputs.start < 0 or inputs.end > room:
        raise ValueError(f"{kernel}: tokens {inputs.start} to {inputs.end - 1} do not fit pages for {room}")
    if inputs.cos_sin is not None:
        if not rotates_queries(device, layout, dtype):
            raise ValueError(f"{kernel}: rotates no queries for a cache of {dtype} with {layout}")
        check(kernel, "cos_sin", inputs.cos_sin, dtype=np.float32, shape=(None, layout.head_dim // 2, 2))
        if inputs.end > inputs.cos_sin.shape[0]:
            raise ValueError(f"{kernel}: position {inputs.end - 1} is beyond the {inputs.cos_sin.shape[0]} of cos_sin")
    window = check_window(kernel, inputs.window)
    sizes = inputs.num_tokens, inputs.start, layout, dtype.itemsize, inputs.window, _itemsize(out)
    cost = partial(attention_prefill_cost, *sizes)
    if rotates_queries(device, layout, dtype):
        rows = out if isinstance(out, ImageRows) else ImageRows(out, 0, 0)
        _launch_wgmma(device, inputs, stride, window, rows, cost)
        return
    block_queries, shared_bytes = _block(layout.head_dim, dtype.itemsize)
    device.launch(
        kernel,
        f"attention_prefill<{CACHE_TYPES[dtype]}, {layout.head_dim}>",
        grid=(layout.num_attention_heads, -(-inputs.num_tokens // block_queries)),
        block=_BLOCK_SIZE,
        arguments=(
            *(inputs.qkv, np.int32(stride), *inputs.cache.arrays, inputs.pages),
            *int32s(layout.num_key_value_heads, inputs.num_tokens, inputs.start),
            *(window, softmax_scale(layout), out, np.int32(_itemsize(out) == 4)),
        ),
        shared_bytes=shared_bytes,
        cost=cost,
    )


def _itemsize(out: Array | ImageRows) -> int:
    return 2 if isinstance(out, ImageRows) else out.dtype.itemsize


def _launch_wgmma(
    device: Launcher, inputs: PromptInputs, stride: int, window: np.int32, rows: ImageRows, cost: Cost
) -> None:
    layout, cache = inputs.layout, inputs.cache
    num_rows = inputs.num_tokens * layout.group_size
    form = choose_form(num_rows, inputs.end, layout.num_key_value_heads, device.num_multiprocessors)
    num_tiles = -(-num_rows // (form.consumers * _GROUP_ROWS))
    num_items = num_tiles * layout.num_key_value_heads
    shape = PrefillShape(
        q_stride=stride,
        num_key_value_heads=layout.num_key_value_heads,
        group_size=layout.group_size,
        num_tokens=inputs.num_tokens,
        num_tiles=num_tiles,
        start=inputs.start,
        window=int(window),
        first_token=rows.first_token,
        out_is_float=int(rows.image.dtype == np.float32),
        scale=softmax_scale(layout),
    )
    device.launch(
        "attention_prefill_wgmma",
        wgmma_name(cache.dtype, form, rows.unit_inputs),
        grid=(num_items if form in _SHORT_FORMS else min(num_items, device.num_multiprocessors),),
        block=128 * (form.consumers + 1),
        arguments=(inputs.qkv, inputs.cos_sin, cache.keys, cache.values, inputs.pages, rows.image, shape),
        shared_bytes=form.shared_bytes,
        overlaps=True,
        cost=cost,
    )


def _block(head_dim: int, itemsize: int) -> tuple[int, int]:
    """Queries and bytes of shared memory of a block, as prefill_mma.cuh lays them out."""
    if itemsize == 4:
        return 32, 4 * ((32 + 32) * (head_dim + 4) + 32 * 36)
    is_coded = has_scales(itemsize)
    queries = 128 if head_dim <= 128 else 64
    tokens = 64 if head_dim <= (96 if is_coded else 128) else 32
    padded = -(-head_dim // 16) * 16
    arriving = tokens * (padded + 2 * 4) if is_coded else 0
    return queries, 2 * (queries + 2 * tokens) * (padded + 8) + arriving


def choose_form(num_rows: int, num_tokens: int, num_key_value_heads: int, num_multiprocessors: int) -> WgmmaForm:
    """The form for `num_rows` rows that see up to `num_tokens` tokens.

    Where rows see more tokens, two groups of warps share keys and values if the card has too few multiprocessors for
    one group each.
    """
    short = next((form for form in _SHORT_FORMS if num_tokens <= form.tokens), None)
    if short is not None:
        return short
    return _ALONE if -(-num_rows // _GROUP_ROWS) * num_key_value_heads <= num_multiprocessors else _SHARED


def attention_prefill_cost(
    num_tokens: int, start: int, layout: QkvLayout, itemsize: int, window: int | None, out_itemsize: int = 4
) -> KernelCost:
    """The least that one call needs: every visible token once, and the products that are not masked."""
    seen = sum(range(start + 1, start + num_tokens + 1))
    if window is not None:
        seen = sum(min(position + 1, window) for position in range(start, start + num_tokens))
    first = max(0, start + 1 - window) if window else 0
    cached = 2 * (start + num_tokens - first) * cached_bytes(layout, itemsize)
    queries = num_tokens * layout.q_size
    return KernelCost(4 * queries + cached, out_itemsize * queries, 4 * seen * layout.q_size, cached, 8 * itemsize)


def _variants() -> Iterator[str]:
    for dtype in (np.dtype(np.float16), np.dtype(np.uint16)):
        for unit_inputs in (0, *UNIT_INPUTS) if _makes_images(dtype) else (0,):
            yield from (wgmma_name(dtype, form, unit_inputs) for form in (*_SHORT_FORMS, _ALONE, _SHARED))


WGMMA_SPEC = KernelSpec(
    "attention_prefill_wgmma",
    "rotary of the queries and causal attention of many tokens, on sm_90",
    tuple(_variants()),
    only_arch="sm_90",
)
