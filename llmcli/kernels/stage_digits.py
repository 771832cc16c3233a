"""Activations as two 8-bit digits, times a norm's weights: what gemm_codes multiplies."""

import ctypes
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import WEIGHT_C_TYPES, TileLayout

BLOCK_SIZE = 512
TOKENS = (16, 32, 64)  # rows of one image


class StageShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


def tokens_of(layout: TileLayout, num_rows: int) -> int:
    """Rows of one image where there are `num_rows` in all."""
    # With zero points the product has no registers for 64.
    possible = TOKENS if layout.is_symmetric else TOKENS[:-1]
    return next((tokens for tokens in possible if num_rows <= tokens), possible[-1])


def span_bytes(layout: TileLayout, tokens: int) -> int:
    """SPAN_BYTES of common/digit_image.cuh."""
    return tokens * (2 * layout.span_inputs + (4 if layout.is_symmetric else 8))


def image_bytes(layout: TileLayout, num_rows: int) -> int:
    """Bytes of the images of `num_rows` rows."""
    tokens = tokens_of(layout, num_rows)
    return -(-num_rows // tokens) * layout.num_spans * span_bytes(layout, tokens)


def stage_digits(
    device: Device,
    *,
    layout: TileLayout,
    x: Any,
    image: Any,
    factors: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
) -> None:
    """Write the digits of x, times the norm's weights, as a matrix of `layout` wants them, and each row's norm factor.

    May start before the kernel in front has ended.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; image uint8 [at least image_bytes]; factors
            float32 [num_rows]; norm_weight float32 [num_inputs]
    Raises: ValueError
    """
    num_rows = x.shape[0]
    check("stage_digits", "x", x, dtype=np.float32, shape=(None, layout.num_inputs), row_stride=True, aligned=4)
    check("stage_digits", "factors", factors, dtype=np.float32, shape=(num_rows,), aligned=4)
    if image.nbytes < image_bytes(layout, num_rows):
        raise ValueError(f"stage_digits: image has {image.nbytes} bytes, expected {image_bytes(layout, num_rows)}")
    if norm_weight is not None:
        check("stage_digits", "norm_weight", norm_weight, dtype=np.float32, shape=(layout.num_inputs,))
    shape = StageShape(num_rows=num_rows, num_inputs=layout.num_inputs, x_stride=x.strides[0] // 4, eps=eps)
    device.launch(
        "stage_digits",
        kernel_name(layout, tokens_of(layout, num_rows)),
        grid=(num_rows,),
        block=BLOCK_SIZE,
        arguments=(x, norm_weight, image, factors, shape),
        overlaps=True,
        cost=partial(stage_digits_cost, layout, num_rows, has_norm=norm_weight is not None),
    )


def stage_digits_cost(layout: TileLayout, num_rows: int, *, has_norm: bool) -> KernelCost:
    """What one call moves."""
    return KernelCost(
        read_bytes=4 * layout.num_inputs * (num_rows + has_norm),
        written_bytes=2 * layout.num_inputs * num_rows,
        flops=4 * layout.num_inputs * num_rows,
        stored_bytes=4 * layout.num_inputs * has_norm,
    )


def kernel_name(layout: TileLayout, tokens: int) -> str:
    """The name expression."""
    is_symmetric = "true" if layout.is_symmetric else "false"
    return f"stage_digits<{WEIGHT_C_TYPES[layout.weight_type]}, {is_symmetric}, {tokens}>"


SPEC = KernelSpec(
    "stage_digits",
    "rows as two 8-bit digits, times the norm's weights",
    tuple(
        f"stage_digits<{weight_type}, {is_symmetric}, {tokens}>"
        for weight_type in ("Int8", "Int4")
        for is_symmetric in ("true", "false")
        for tokens in TOKENS
    ),
)
