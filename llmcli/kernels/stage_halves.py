"""Activations as pairs of 16-bit numbers, times a norm's weights: what gemm_halves multiplies."""

import ctypes
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import WEIGHT_C_TYPES, TileLayout

BLOCK_SIZE = 512
TOKENS = (16, 32, 64, 128)  # rows of one image


class StageShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


def tokens_of(num_rows: int) -> int:
    """Rows of one image where there are `num_rows` in all."""
    return next((tokens for tokens in TOKENS if num_rows <= tokens), TOKENS[-1])


def unit_bytes(layout: TileLayout, tokens: int) -> int:
    """UNIT_BYTES of common/half_image.cuh."""
    return tokens * (4 * layout.unit_inputs + (4 if layout.weight_type == "float16" else 0))


def image_bytes(layout: TileLayout, num_rows: int) -> int:
    """Bytes of the images of `num_rows` rows."""
    tokens = tokens_of(num_rows)
    return -(-num_rows // tokens) * layout.num_units * unit_bytes(layout, tokens)


def stage_halves(
    device: Device,
    *,
    layout: TileLayout,
    x: Any,
    image: Any,
    factors: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
) -> None:
    """Write x, times the norm's weights, as pairs of the weights' type, and each row's norm factor.

    May start before the kernel in front has ended.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; image uint8 [at least image_bytes]; factors
            float32 [num_rows]; norm_weight float32 [num_inputs]
    Raises: ValueError
    """
    num_rows = x.shape[0]
    check("stage_halves", "x", x, dtype=np.float32, shape=(None, layout.num_inputs), row_stride=True, aligned=4)
    check("stage_halves", "factors", factors, dtype=np.float32, shape=(num_rows,), aligned=4)
    if image.nbytes < image_bytes(layout, num_rows):
        raise ValueError(f"stage_halves: image has {image.nbytes} bytes, expected {image_bytes(layout, num_rows)}")
    if norm_weight is not None:
        check("stage_halves", "norm_weight", norm_weight, dtype=np.float32, shape=(layout.num_inputs,))
    shape = StageShape(num_rows=num_rows, num_inputs=layout.num_inputs, x_stride=x.strides[0] // 4, eps=eps)
    device.launch(
        "stage_halves",
        kernel_name(layout.weight_type, tokens_of(num_rows)),
        grid=(num_rows,),
        block=BLOCK_SIZE,
        arguments=(x, norm_weight, image, factors, shape),
        overlaps=True,
        cost=partial(stage_halves_cost, layout, num_rows, has_norm=norm_weight is not None),
    )


def stage_halves_cost(layout: TileLayout, num_rows: int, *, has_norm: bool) -> KernelCost:
    """What one call moves."""
    return KernelCost(
        read_bytes=4 * layout.num_inputs * (num_rows + has_norm),
        written_bytes=4 * layout.num_inputs * num_rows,
        flops=4 * layout.num_inputs * num_rows,
        stored_bytes=4 * layout.num_inputs * has_norm,
    )


def kernel_name(weight_type: str, tokens: int) -> str:
    """The name expression."""
    return f"stage_halves<{WEIGHT_C_TYPES[weight_type]}, {tokens}>"


SPEC = KernelSpec(
    "stage_halves",
    "rows as pairs of 16-bit numbers, times the norm's weights",
    tuple(kernel_name(weight_type, tokens) for weight_type in ("float16", "bfloat16") for tokens in TOKENS),
)
