"""Launches attention_prefill_wgmma.cu, which attention_prefill chooses on cards with wgmma."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.spec import Cost, KernelSpec
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows

HEAD_DIM = 128
_GROUP_ROWS = 64  # of a group of four warps


@dataclass(frozen=True)
class Form:
    """A form of the kernel. All forms give the same bits.

    `consumers`: groups of warps that share keys and values; `stages`: tiles of these in shared memory; `tokens`: of a
    tile. A form with tiles of fewer than 128 tokens takes rows whose tokens fit its first tile.
    """

    consumers: int
    stages: int
    tokens: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * 2 * self.tokens * HEAD_DIM * 2


_SHORT_FORMS = Form(1, 1, 16), Form(1, 1, 64)
_ALONE, _SHARED = Form(1, 3, 128), Form(2, 3, 128)


class PrefillShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("q_stride", ctypes.c_int32),
        ("num_key_value_heads", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("first_token", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def takes(device: Device, layout: QkvLayout, dtype: np.dtype[np.generic]) -> bool:
    """Whether the kernel takes this card and such a cache. The number of tokens must not matter: bits depend on it."""
    return device.can_wgmma and layout.head_dim == HEAD_DIM and dtype.itemsize == 2


def makes_images(dtype: np.dtype[np.generic]) -> bool:
    """Whether it may write fp16 without scales: means of such values are as small as the values."""
    return dtype == np.float16


def attention_prefill_wgmma(
    device: Device,
    *,
    qkv: Array,
    q_stride: int,
    cos_sin: Array | None,
    layout: QkvLayout,
    keys: Array,
    values: Array,
    pages: Array,
    start: int,
    window: int,
    scale: float,
    out: Array | ImageRows,
    cost: Cost,
) -> None:
    """Attend from the tokens of `qkv`; attention_prefill has checked all."""
    num_rows = qkv.shape[0] * layout.group_size
    form = choose_form(num_rows, start + qkv.shape[0], layout.num_key_value_heads, device.num_multiprocessors)
    num_tiles = -(-num_rows // (form.consumers * _GROUP_ROWS))
    num_items = num_tiles * layout.num_key_value_heads
    rows = out if isinstance(out, ImageRows) else ImageRows(out, 0, 0)
    shape = PrefillShape(
        q_stride=q_stride,
        num_key_value_heads=layout.num_key_value_heads,
        group_size=layout.group_size,
        num_tokens=qkv.shape[0],
        num_tiles=num_tiles,
        start=start,
        window=window,
        first_token=rows.first_token,
        scale=scale,
    )
    device.launch(
        "attention_prefill_wgmma",
        kernel_name(keys.dtype, form, rows.unit_inputs),
        grid=(num_items if form in _SHORT_FORMS else min(num_items, device.num_multiprocessors),),
        block=128 * (form.consumers + 1),
        arguments=(qkv, cos_sin, keys, values, pages, rows.image, shape),
        shared_bytes=form.shared_bytes,
        overlaps=True,
        cost=cost,
    )


def choose_form(num_rows: int, num_tokens: int, num_key_value_heads: int, num_multiprocessors: int) -> Form:
    """The form for `num_rows` rows that see up to `num_tokens` tokens.

    Where rows see more tokens, two groups of warps share keys and values if the card has too few multiprocessors for
    one group each.
    """
    short = next((form for form in _SHORT_FORMS if num_tokens <= form.tokens), None)
    if short is not None:
        return short
    return _ALONE if -(-num_rows // _GROUP_ROWS) * num_key_value_heads <= num_multiprocessors else _SHARED


def kernel_name(dtype: np.dtype[np.generic], form: Form, unit_inputs: int) -> str:
    """The name expression; `unit_inputs` are those of an image, 0 for rows of floats."""
    sizes = f"{form.consumers}, {form.stages}, {unit_inputs}, {form.tokens}"
    return f"attention_prefill_wgmma<{C_TYPES[dtype]}, {sizes}>"


def _variants() -> Iterator[str]:
    for dtype in (np.dtype(np.float16), np.dtype(np.uint16)):
        for unit_inputs in (0, *UNIT_INPUTS) if makes_images(dtype) else (0,):
            yield from (kernel_name(dtype, form, unit_inputs) for form in (*_SHORT_FORMS, _ALONE, _SHARED))


SPEC = KernelSpec(
    "attention_prefill_wgmma",
    "rotary of the queries and causal attention of many tokens, on sm_90",
    tuple(_variants()),
    only_arch="sm_90",
)
