"""y = f(x' @ W.T + bias) for a few rows of activations, normed or not, and a tiled matrix: the products of decoding."""

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    SCALE_C_TYPES,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
)

Epilogue = Literal["store", "add", "swiglu"]

MAX_ROWS = 8
BLOCK_SIZE = 256
_NUM_WARPS = BLOCK_SIZE // 32
_CHUNK_INPUTS = 8 * BLOCK_SIZE  # one vector of 8 inputs for every thread: what keeps bits free of the chunk size
_STATIC_SHARED_BYTES = 1024  # the kernel's own arrays, and what the driver takes of each block
_EPILOGUES: tuple[Epilogue, ...] = ("store", "add", "swiglu")

SPEC = KernelSpec(
    "gemv",
    "few rows times a tiled matrix, with norm, bias and residual or SwiGLU",
    (
        *(f"gemv<Int8, __nv_bfloat16, 0, true, 1, {epilogue}, 4>" for epilogue in (0, 1, 2)),
        *(f"gemv<Int8, __nv_bfloat16, 128, true, {tiles}, {epilogue}, 4>" for tiles in (1, 2) for epilogue in (1, 2)),
        *(f"gemv<Int4, __nv_bfloat16, 128, true, {tiles}, {epilogue}, 4>" for tiles in (1, 2) for epilogue in (1, 2)),
        *(f"gemv<{weight}, float, 0, true, {tiles}, 2, 8>" for weight in ("__half", "float") for tiles in (1, 2)),
        "gemv<__nv_bfloat16, float, 0, true, 1, 0, 4>",
        "gemv<__nv_bfloat16, float, 0, true, 2, 2, 8>",
        "gemv<Int8, float, 32, false, 4, 2, 4>",
        "gemv<Int8, float, 4096, false, 1, 2, 2>",
        "gemv<Int4, __half, 32, true, 1, 2, 8>",
        "gemv<Int4, float, 16, false, 8, 2, 2>",
    ),
)


class GemvShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("chunk_units", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class GemvPlan:
    """How a product is launched. No choice in it changes a bit of the result.

    `num_rows` rows go into one launch; `stages` units a warp are under way; `chunk_units` of x stand in shared memory.
    """

    name: str
    num_rows: int
    num_blocks: int
    chunk_units: int
    shared_bytes: int


def plan_gemv(
    layout: TileLayout, num_rows: int, epilogue: Epilogue, *, num_multiprocessors: int, shared_bytes_per_block: int
) -> GemvPlan:
    """The launch for up to 8 rows, on a card of so many multiprocessors and so much shared memory a block.

    Two blocks a multiprocessor where x fits twice, then one with a deeper ring, then x in chunks, then fewer rows.
    Raises: ValueError for a card with too little shared memory for one row
    """
    item_tiles = 2 if epilogue == "swiglu" else 1
    limits = (
        (4, (shared_bytes_per_block + 1024) // 2 - 1024, 2, False),
        (8, shared_bytes_per_block, 1, False),
        (4, shared_bytes_per_block, 1, False),
        (4, shared_bytes_per_block, 1, True),
        (2, shared_bytes_per_block, 1, True),
    )
    for rows in range(min(num_rows, MAX_ROWS), 0, -1):
        for stages, limit, blocks_per_multiprocessor, is_chunked in limits:
            ring_bytes = _NUM_WARPS * stages * _slot_bytes(layout)
            partials_bytes = 2 * item_tiles * _NUM_WARPS * rows * TILE_ROWS * 4
            input_bytes = 4 * rows
            room = (limit - _STATIC_SHARED_BYTES - ring_bytes - partials_bytes) // input_bytes
            chunk_inputs = layout.num_units * layout.unit_inputs
            if is_chunked:
                chunk_inputs = min(room // _CHUNK_INPUTS * _CHUNK_INPUTS, chunk_inputs)
            if not 0 < chunk_inputs <= room:
                continue
            num_items = layout.num_tiles // item_tiles
            slots = num_multiprocessors * blocks_per_multiprocessor
            rounds = -(-num_items // slots)
            return GemvPlan(
                name=gemv_name(layout, rows, epilogue, stages),
                num_rows=rows,
                num_blocks=-(-num_items // rounds),  # every block has the same work, also where that leaves some idle
                chunk_units=chunk_inputs // layout.unit_inputs,
                shared_bytes=chunk_inputs * input_bytes + ring_bytes + partials_bytes,
            )
    raise ValueError(f"gemv: {shared_bytes_per_block} bytes of shared memory a block are too few")


def gemv_name(layout: TileLayout, num_rows: int, epilogue: Epilogue, stages: int) -> str:
    """The name expression of the kernel for up to `num_rows` rows."""
    virtual_rows = num_rows * _groups_across_lanes(layout)
    column_tiles = next(tiles for tiles in (1, 2, 4, 8) if virtual_rows <= 4 * tiles)
    arguments = (
        WEIGHT_C_TYPES[layout.weight_type],
        SCALE_C_TYPES[layout.scale_type or "float32"],
        str(layout.group_size or 0),
        "true" if layout.is_symmetric else "false",
        str(column_tiles),
        str(_EPILOGUES.index(epilogue)),
        str(stages),
    )
    return f"gemv<{', '.join(arguments)}>"


def gemv(
    device: Device,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """Multiply; `out` is written ("store"), added to ("add"), or gets silu(gate) * up of alternate tiles ("swiglu").

    May start before the kernel in front has ended and then reads the matrix at once: that kernel must not write it.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; out float32 [num_rows, num_outputs], alike, where
            num_outputs ends in the last tile; norm_weight float32 [num_inputs]; bias float32 [16 * num_tiles]
    Raises: ValueError
    """
    layout = matrix.layout
    num_rows = x.shape[0]
    num_items = layout.num_tiles // (2 if epilogue == "swiglu" else 1)
    check("gemv", "x", x, dtype="float32", shape=(None, layout.num_inputs), row_stride=True, aligned=4)
    check("gemv", "out", out, dtype="float32", shape=(num_rows, None), row_stride=True, aligned=4)
    if -(-out.shape[1] // TILE_ROWS) != num_items or (epilogue == "swiglu" and layout.num_tiles % 2):
        raise ValueError(f"gemv: out has {out.shape[1]} columns, expected {num_items} tiles of {TILE_ROWS}")
    if norm_weight is not None:
        check("gemv", "norm_weight", norm_weight, dtype="float32", shape=(layout.num_inputs,))
    if bias is not None:
        check("gemv", "bias", bias, dtype="float32", shape=(layout.padded_rows,), aligned=4)
    begin = 0
    while begin < num_rows:
        plan = plan_gemv(
            layout,
            num_rows - begin,
            epilogue,
            num_multiprocessors=device.num_multiprocessors,
            shared_bytes_per_block=device.shared_bytes_per_block,
        )
        end = begin + plan.num_rows
        shape = GemvShape(
            num_rows=plan.num_rows,
            num_inputs=layout.num_inputs,
            num_outputs=out.shape[1],
            x_stride=x.strides[0] // 4,
            out_stride=out.strides[0] // 4,
            chunk_units=plan.chunk_units,
            eps=eps,
        )
        rows = (x[begin:end], norm_weight, bias, out[begin:end])
        device.launch(
            "gemv",
            plan.name,
            grid=(plan.num_blocks,),
            block=BLOCK_SIZE,
            arguments=(matrix.tiles, matrix.scales, matrix.zero_points, *rows, shape),
            shared_bytes=plan.shared_bytes,
            overlaps=True,
        )
        begin = end


def gemv_cost(
    *, layout: TileLayout, num_rows: int, epilogue: Epilogue = "store", has_norm: bool = False, has_bias: bool = False
) -> KernelCost:
    """What one call moves: the matrix once for every 8 rows, x once (each block reads it again, from L2), results."""
    passes = -(-num_rows // MAX_ROWS)
    num_outputs = layout.num_rows // (2 if epilogue == "swiglu" else 1)
    out_bytes = 4 * num_rows * num_outputs
    vectors = 4 * (layout.num_inputs * has_norm + layout.padded_rows * has_bias)
    return KernelCost(
        read_bytes=passes * (layout.num_bytes + vectors)
        + 4 * num_rows * layout.num_inputs
        + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes,
        flops=2 * num_rows * layout.num_rows * layout.num_inputs,
    )


def _groups_per_unit(layout: TileLayout) -> int:
    return max(1, layout.unit_inputs // layout.group_size) if layout.group_size else 1


def _groups_across_lanes(layout: TileLayout) -> int:
    return min(4, _groups_per_unit(layout))


def _slot_bytes(layout: TileLayout) -> int:
    if layout.group_size is None:
        return UNIT_BYTES
    itemsize = layout.scales_bytes // (layout.padded_rows * layout.num_groups)
    zero_points_bytes = 0 if layout.is_symmetric else TILE_ROWS
    return UNIT_BYTES + _groups_per_unit(layout) * (TILE_ROWS * itemsize + zero_points_bytes)
