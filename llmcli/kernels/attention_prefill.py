"""Launcher of attention_prefill.cu: attention of many new tokens of one row to all cached tokens up to each of them."""

import math
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_prefill_wgmma import attention_prefill_wgmma, makes_images, takes
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import (
    CACHE_TYPES,
    PAGE_TOKENS,
    QkvLayout,
    cached_bytes,
    check_cache,
    check_layout,
    check_qkv,
    check_window,
    has_scales,
)
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows, check_image

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


def kernel_name(keys: Array) -> str:
    """The name expression for this cache."""
    return f"attention_prefill<{CACHE_TYPES[keys.dtype]}, {keys.shape[3]}>"


def rotates_queries(device: Device, layout: QkvLayout, dtype: np.dtype[Any]) -> bool:
    """Whether `attention_prefill` takes `cos_sin` on this card, for a cache of this type."""
    return takes(device, layout, dtype)


def writes_images(device: Device, layout: QkvLayout, dtype: np.dtype[Any]) -> bool:
    """Whether its `out` may be rows of an image."""
    return takes(device, layout, dtype) and makes_images(dtype)


def attention_prefill(
    device: Device,
    *,
    qkv: Array,
    layout: QkvLayout,
    keys: Array,
    values: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    pages: Array,
    start: int,
    window: int | None,
    cos_sin: Array | None = None,
    out: Array | ImageRows,
) -> None:
    """Attend from n tokens of one row, the first at position `start`, whose keys and values are cached already.

    With a window a token sees only that many tokens, itself included. A token's bits do not depend on its chunk. With
    `cos_sin` queries are rotated first. Rows of an image have no scales. Some cards and caches lack these two.
    Shapes: qkv [n, layout.width] float32, queries normed and rotated, rows may be further apart; keys, values
            [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim], one layer's; key_scales, value_scales [num_pages,
            num_key_value_heads, PAGE_TOKENS] float32 with codes; pages [pages_per_row] int32, the row's page table;
            cos_sin [max_seq_len, head_dim / 2, 2] float32; out [n, layout.q_size] float32, or rows of an image
    Raises: ValueError, also where `rotates_queries` or `writes_images` is False
    """
    check_layout("attention_prefill", layout)
    stride = check_qkv("attention_prefill", qkv, layout)
    num_tokens = qkv.shape[0]
    check_cache("attention_prefill", keys, values, layout, key_scales, value_scales)
    check("attention_prefill", "pages", pages, dtype=np.int32, shape=(None,), aligned=4)
    if isinstance(out, ImageRows):
        _check_image(device, out, layout, num_tokens, keys.dtype)
    else:
        check("attention_prefill", "out", out, dtype=np.float32, shape=(num_tokens, layout.q_size))
    room = pages.shape[0] * PAGE_TOKENS
    if start < 0 or start + num_tokens > room:
        raise ValueError(f"attention_prefill: tokens {start} to {start + num_tokens - 1} do not fit pages for {room}")
    if cos_sin is not None:
        _check_rotary(device, cos_sin, layout, start + num_tokens, keys.dtype)
    visible = check_window("attention_prefill", window)
    scale = layout.head_dim**-0.5 * math.log2(math.e)

    def cost() -> KernelCost:
        itemsize = 2 if isinstance(out, ImageRows) else 4
        return attention_prefill_cost(num_tokens, start, layout, keys.dtype.itemsize, window, itemsize)

    if takes(device, layout, keys.dtype):
        attention_prefill_wgmma(
            device,
            qkv=qkv,
            q_stride=stride,
            cos_sin=cos_sin,
            layout=layout,
            keys=keys,
            values=values,
            pages=pages,
            start=start,
            window=int(visible),
            scale=scale,
            out=out,
            cost=cost,
        )
        return
    block_queries, shared_bytes = _block(layout.head_dim, keys.dtype.itemsize)
    device.launch(
        "attention_prefill",
        kernel_name(keys),
        grid=(layout.num_attention_heads, -(-num_tokens // block_queries)),
        block=_BLOCK_SIZE,
        arguments=(
            qkv,
            np.int32(stride),
            keys,
            values,
            key_scales,
            value_scales,
            pages,
            np.int32(layout.num_key_value_heads),
            np.int32(num_tokens),
            np.int32(start),
            visible,
            np.float32(scale),
            out,
        ),
        shared_bytes=shared_bytes,
        cost=cost,
    )


def _block(head_dim: int, itemsize: int) -> tuple[int, int]:
    """Queries and bytes of shared memory of a block, as prefill_mma.cuh and prefill_float.cuh lay them out."""
    if itemsize == 4:
        return 32, 4 * ((32 + 32) * (head_dim + 4) + 32 * 36)
    is_coded = has_scales(itemsize)
    queries = 128 if head_dim <= 128 else 64
    tokens = 64 if head_dim <= (96 if is_coded else 128) else 32
    padded = -(-head_dim // 16) * 16
    arriving = tokens * (padded + 2 * 4) if is_coded else 0
    return queries, 2 * (queries + 2 * tokens) * (padded + 8) + arriving


def _check_image(device: Device, rows: ImageRows, layout: QkvLayout, num_tokens: int, dtype: np.dtype[Any]) -> None:
    if not writes_images(device, layout, dtype):
        raise ValueError(f"attention_prefill: writes no images from a cache of {dtype} with {layout}")
    if rows.unit_inputs not in UNIT_INPUTS:
        raise ValueError(f"attention_prefill: units have {rows.unit_inputs} inputs, expected one of {UNIT_INPUTS}")
    if rows.first_token < 0:
        raise ValueError(f"attention_prefill: the first token of the image is {rows.first_token}, expected 0 or more")
    check_image("attention_prefill", "out", rows.image, layout.q_size, rows.first_token + num_tokens)


def _check_rotary(device: Device, cos_sin: Array, layout: QkvLayout, end: int, dtype: np.dtype[Any]) -> None:
    if not rotates_queries(device, layout, dtype):
        raise ValueError(f"attention_prefill: rotates no queries for a cache of {dtype} with {layout}")
    check("attention_prefill", "cos_sin", cos_sin, dtype=np.float32, shape=(None, layout.head_dim // 2, 2))
    if end > cos_sin.shape[0]:
        raise ValueError(f"attention_prefill: position {end - 1} is beyond the {cos_sin.shape[0]} of cos_sin")


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
