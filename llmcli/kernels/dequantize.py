"""Writes some tiles of a matrix as plain rows in the type of prefill's activations, for the matrix library."""

import ctypes
from typing import Any

import numpy as np

from llmcli.kernels.arguments import c_type, check
from llmcli.kernels.launches import Launcher, Offset
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    BLOCK_SCALE,
    SCALE_C_TYPES,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
    scale_c_type,
)

BLOCK_SIZE = 256

# The types of written rows and of the activations multiplied with them.
ACTIVATION_DTYPES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.float16),
    "fp8": np.dtype(np.float16),
    "int4": np.dtype(np.float16),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_ONE_GROUP = 31  # a shift that takes every input to group 0

SPEC = KernelSpec(
    "dequantize",
    "tiles to plain rows",
    (
        *(
            f"dequantize<{codes}, {scale}, __half>"
            for codes in ("Int8", "Int4", "Fp8")
            for name, scale in {**SCALE_C_TYPES, "lifted": "LiftedScale"}.items()
            if (name != BLOCK_SCALE or codes == "Fp8") and (name != "lifted" or codes != "Fp8")
        ),
        *(f"dequantize<{weight}, float, {weight}>" for weight in ("__half", "__nv_bfloat16", "float")),
        "dequantize<__nv_bfloat16, float, __half>",
    ),
)


class DequantizeShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_tiles", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("group_shift", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("unlift", ctypes.c_float),
    )


def dequantize(device: Launcher, *, matrix: TiledMatrix, first_tile: int, num_tiles: int, out: Any) -> None:
    """Write tiles [first_tile, first_tile + num_tiles) as rows; padded rows of the matrix are zeros.

    Shapes: out [16 * num_tiles, num_inputs] in ACTIVATION_DTYPES[weight_type], or bfloat16 as stored (uint16), rows
            any distance apart; fast where that distance is a multiple of 16 bytes
    Raises: ValueError
    """
    layout = matrix.layout
    if not 0 <= first_tile < first_tile + num_tiles <= layout.num_tiles:
        raise ValueError(f"dequantize: tiles {first_tile} to {first_tile + num_tiles} of {layout.num_tiles}")
    shape = (num_tiles * TILE_ROWS, layout.num_inputs)
    keeps_bfloat16 = layout.weight_type == "bfloat16" and out.dtype == np.uint16
    dtype = out.dtype if keeps_bfloat16 else ACTIVATION_DTYPES[layout.weight_type]
    check("dequantize", "out", out, dtype=dtype, shape=shape, row_stride=True)
    weight_type = WEIGHT_C_TYPES[layout.weight_type]
    device.launch(
        "dequantize",
        f"dequantize<{weight_type}, {scale_c_type(layout, matrix.widening)}, {c_type(out)}>",
        grid=(-(-num_tiles * layout.num_units * (UNIT_BYTES // 16) // BLOCK_SIZE),),
        block=BLOCK_SIZE,
        arguments=(
            *(_from_tile(first_tile, array) for array in (matrix.tiles, matrix.scales, matrix.zero_points)),
            out,
            DequantizeShape(
                num_tiles=num_tiles,
                num_inputs=layout.num_inputs,
                num_units=layout.num_units,
                num_groups=layout.num_groups,
                group_shift=layout.group_size.bit_length() - 1 if layout.group_size else _ONE_GROUP,
                out_stride=out.strides[0] // out.dtype.itemsize,
                unlift=matrix.unlift,
            ),
        ),
        cost=lambda: dequantize_cost(layout=layout, num_tiles=num_tiles, itemsize=out.dtype.itemsize),
    )


def _from_tile(first_tile: int, array: Any | None) -> Offset | None:
    return None if array is None else Offset(array, first_tile * array.strides[0])


def dequantize_cost(*, layout: TileLayout, num_tiles: int, itemsize: int) -> KernelCost:
    """What one call moves; `itemsize` is that of the output."""
    rows = num_tiles * TILE_ROWS
    matrix_bytes = layout.num_bytes // layout.num_tiles * num_tiles
    return KernelCost(
        read_bytes=matrix_bytes,
        written_bytes=rows * layout.num_inputs * itemsize,
        flops=rows * layout.num_inputs if layout.has_scales else 0,
        stored_bytes=matrix_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
    )
