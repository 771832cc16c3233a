"""x @ W.T for the tokens of a short prompt and a tiled matrix of codes, which are widened in registers."""

import ctypes
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
    Widening,
    fastest_widening,
    scale_c_type,
)

BLOCK_SIZE = 256
_BLOCK_TILES, _STEP_UNITS = 4, 2
_TOKEN_TILES = (2, 4, 8)  # of 8 tokens
_MAX_STAGES = 4


class GemmShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("unlift", ctypes.c_float),
    )


def takes(layout: TileLayout) -> bool:
    """Whether the kernel takes such a matrix: codes in groups of whole units or in one, rows of whole vectors."""
    has_whole_units = layout.group_size is None or layout.group_size >= layout.unit_inputs
    return layout.has_codes and has_whole_units and layout.num_inputs % 8 == 0


def gemm_packed(device: Launcher, *, matrix: TiledMatrix, x: Any, out: Any) -> None:
    """Multiply tokens with the matrix.

    Shapes: x float16 [num_tokens, num_inputs], rows a multiple of 16 bytes apart; out float32 [num_tokens,
            num_outputs], rows any distance apart, where num_outputs ends in the last tile
    Raises: ValueError, also for a matrix that it does not take
    """
    layout = matrix.layout
    if not takes(layout):
        raise ValueError(f"gemm_packed: does not take {layout}")
    num_tokens = x.shape[0]
    check("gemm_packed", "x", x, dtype=np.float16, shape=(None, layout.num_inputs), row_stride=True)
    check("gemm_packed", "out", out, dtype=np.float32, shape=(num_tokens, None), row_stride=True, aligned=4)
    x_stride = x.strides[0] if num_tokens > 1 else 2 * layout.num_inputs
    if x_stride % 16:
        raise ValueError(f"gemm_packed: rows of x are {x_stride} bytes apart, expected a multiple of 16")
    if -(-out.shape[1] // TILE_ROWS) != layout.num_tiles:
        raise ValueError(
            f"gemm_packed: out has {out.shape[1]} columns, expected {layout.num_tiles} tiles of {TILE_ROWS}"
        )
    token_tiles, stages = choose_tiling(layout, num_tokens, device.shared_bytes_per_block)
    device.launch(
        "gemm_packed",
        kernel_name(layout, matrix.widening, token_tiles, stages),
        grid=(-(-num_tokens // (8 * token_tiles)), -(-layout.num_tiles // _BLOCK_TILES)),
        block=BLOCK_SIZE,
        arguments=(
            matrix.tiles,
            matrix.scales,
            matrix.zero_points,
            x,
            out,
            GemmShape(
                num_tokens=num_tokens,
                num_inputs=layout.num_inputs,
                num_outputs=out.shape[1],
                x_stride=x_stride // 2,
                out_stride=out.strides[0] // 4,
                unlift=matrix.unlift,
            ),
        ),
        shared_bytes=stages * _step_bytes(layout, token_tiles),
        cost=lambda: gemm_packed_cost(layout=layout, num_tokens=num_tokens),
    )


def kernel_name(layout: TileLayout, widening: Widening, token_tiles: int, stages: int) -> str:
    """The name expression; its last parameter is the size of a step in shared memory, for the compiler to compare."""
    parameters = (
        WEIGHT_C_TYPES[layout.weight_type],
        scale_c_type(layout, widening),
        str(layout.group_size or 0),
        "true" if layout.is_symmetric else "false",
        str(token_tiles),
        str(stages),
        str(_step_bytes(layout, token_tiles)),
    )
    return f"gemm_packed<{', '.join(parameters)}>"


def choose_tiling(layout: TileLayout, num_tokens: int, shared_bytes_per_block: int) -> tuple[int, int]:
    """Tiles of 8 tokens a block, and steps being copied: two blocks a multiprocessor if registers and memory allow it.

    64 tokens go as two blocks of 32: the codes are read twice, but from L2, and by twice the blocks.
    """
    token_tiles = next((tiles for tiles, most in ((2, 16), (4, 64)) if num_tokens <= most), _TOKEN_TILES[-1])
    step_bytes = _step_bytes(layout, token_tiles)
    shared = (shared_bytes_per_block + 1024) // 2 - 1024
    if token_tiles == _TOKEN_TILES[-1] or shared < 2 * step_bytes:
        shared = shared_bytes_per_block
    return token_tiles, min(shared // step_bytes, _MAX_STAGES)


def gemm_packed_cost(*, layout: TileLayout, num_tokens: int) -> KernelCost:
    """What one call moves: the matrix and the tokens once (re-reads are L2's), the results."""
    return KernelCost(
        read_bytes=layout.num_bytes + 2 * num_tokens * layout.num_inputs,
        written_bytes=4 * num_tokens * layout.num_rows,
        flops=2 * num_tokens * layout.num_rows * layout.num_inputs,
        stored_bytes=layout.num_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
    )


def _step_bytes(layout: TileLayout, token_tiles: int) -> int:
    x_bytes = _STEP_UNITS * 8 * token_tiles * (2 * layout.unit_inputs + 64)
    scale_bytes = 0
    if layout.group_size is not None:
        scale_bytes = TILE_ROWS * (layout.scales_bytes // (layout.padded_rows * layout.num_groups))
    zero_bytes = 0 if layout.is_symmetric else TILE_ROWS
    return x_bytes + _BLOCK_TILES * _STEP_UNITS * (UNIT_BYTES + scale_bytes + zero_bytes)


SPEC = KernelSpec(
    "gemm_packed",
    "tokens times a tiled matrix of codes",
    tuple(
        kernel_name(layout, fastest_widening(layout), tiles, stages)
        for weight_type in ("int8", "int4")
        for scale_type, group_size, is_symmetric in (
            ("float32", None, True),
            ("bfloat16", 128, True),
            ("float16", 128, False),
        )
        for layout in (TileLayout(weight_type, TILE_ROWS, 8192, group_size, scale_type, is_symmetric),)
        for tiles, stages in ((2, 4), (4, 4), (8, 2))
    ),
)
