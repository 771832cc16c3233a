"""y = f(x' @ W.T + bias) for a few rows of activations, normed or not, and a tiled matrix: the products of decoding."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from llmcli.kernels.arguments import check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    HALF_ROWS,
    SCALE_C_TYPES,
    SPAN_UNITS,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
)

Epilogue = Literal["store", "add", "swiglu"]

MAX_ROWS = 8
BLOCK_SIZE = 512
NUM_WARPS = BLOCK_SIZE // 32
_ROWS = (1, 2, 4, 8)  # a kernel for each
_DEEPEST = {"int8": 4, "fp8": 4, "int4": 5, "float16": 6, "bfloat16": 6, "float32": 6}  # rings of copies; measured
_TILE_WARPS = {"int8": 8, "fp8": 8, "int4": 8, "float16": 16, "bfloat16": 16, "float32": 16}  # share a tile
STATIC_SHARED_BYTES = 768  # squares, barriers; what follows is aligned to 128
EPILOGUES: tuple[Epilogue, ...] = ("store", "add", "swiglu")


class GemvShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("chunk_spans", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class GemvPlan:
    """How a product is launched. No choice in it changes a bit of the result.

    `num_rows` rows go into one launch, as `column_tiles` times 8 columns of the tensor cores. `chunk_spans` spans of x
    are in shared memory at a time; `cluster` blocks fetch them together.
    """

    name: str
    num_rows: int
    column_tiles: int
    num_blocks: int
    cluster: int
    chunk_spans: int
    shared_bytes: int


@cache
def plan_gemv(
    layout: TileLayout,
    num_rows: int,
    *,
    num_multiprocessors: int,
    shared_bytes_per_block: int,
    can_cluster: bool,
) -> GemvPlan:
    """The launch for up to 8 rows, on a card with these multiprocessors and this shared memory a block.

    One block a multiprocessor; x whole or in as few chunks as fit, then the deepest ring, then fewer rows.
    Raises: ValueError for a card with too little shared memory for one row
    """
    room = shared_bytes_per_block - STATIC_SHARED_BYTES
    for rows in range(min(num_rows, MAX_ROWS), 0, -1):
        kernel_rows = next(one for one in _ROWS if one >= rows)
        # As many blocks as can run at once, even if some have a tile less: idle multiprocessors read nothing.
        cluster = 2 if can_cluster and kernel_rows > 2 else 1
        most = max(min(layout.num_tiles, num_multiprocessors // cluster), 1)
        # Between chunks a warp keeps the sums of all its tiles; with a cluster for each tile they are fewest.
        for num_clusters in (most, layout.num_tiles):
            rings = _rings(layout, kernel_rows, cluster, num_clusters, room)
            if rings:
                ring = min(rings, key=lambda one: (-(-layout.num_spans // one.chunk_spans), -one.stages))
                return GemvPlan(
                    name=gemv_name(layout, kernel_rows, ring.stages),
                    num_rows=rows,
                    column_tiles=_column_tiles(layout, kernel_rows),
                    num_blocks=num_clusters * cluster,
                    cluster=cluster,
                    chunk_spans=ring.chunk_spans,
                    shared_bytes=ring.shared_bytes,
                )
    raise ValueError(f"gemv: {shared_bytes_per_block} bytes of shared memory a block are too few")


def plan_passes(
    layout: TileLayout,
    num_rows: int,
    *,
    num_multiprocessors: int,
    shared_bytes_per_block: int,
    can_cluster: bool,
) -> Iterator[GemvPlan]:
    """The launches for any number of rows: each takes as many of the remaining rows as `plan_gemv` allows.

    Raises: as `plan_gemv`
    """
    while num_rows > 0:
        plan = plan_gemv(
            layout,
            num_rows,
            num_multiprocessors=num_multiprocessors,
            shared_bytes_per_block=shared_bytes_per_block,
            can_cluster=can_cluster,
        )
        yield plan
        num_rows -= plan.num_rows


@dataclass(frozen=True)
class _Ring:
    stages: int
    chunk_spans: int
    shared_bytes: int


def _rings(layout: TileLayout, kernel_rows: int, cluster: int, num_clusters: int, room: int) -> list[_Ring]:
    """The rings of copies that fit into `room` bytes of each block, each with the largest chunk of x."""
    tile_warps = _TILE_WARPS[layout.weight_type]  # all their units are held at once, in equal parts in every block
    round_bytes = tile_warps // cluster * _span_bytes(layout, kernel_rows)
    num_buffers = _num_buffers(kernel_rows) + (cluster > 1)  # one more for what goes to the other block
    buffers_bytes = num_buffers * NUM_WARPS * kernel_rows * TILE_ROWS * 4
    tiles_at_once = num_clusters * cluster * NUM_WARPS // tile_warps
    lane_sums_bytes = -(-layout.num_tiles // tiles_at_once) * BLOCK_SIZE * 4 * _num_sums(layout, kernel_rows)
    rings = []
    for stages in range(2, _DEEPEST[layout.weight_type] + 1):
        fixed_bytes = NUM_WARPS * stages * _slot_bytes(layout) + buffers_bytes
        chunk_spans = layout.num_spans
        if fixed_bytes + -(-chunk_spans // tile_warps) * round_bytes > room:
            fixed_bytes += lane_sums_bytes
            chunk_spans = (room - fixed_bytes) // round_bytes * tile_warps // NUM_WARPS * NUM_WARPS
        if chunk_spans > 0:
            rings.append(_Ring(stages, chunk_spans, fixed_bytes + -(-chunk_spans // tile_warps) * round_bytes))
    return rings


@cache
def gemv_name(layout: TileLayout, kernel_rows: int, stages: int) -> str:
    """The name expression of the kernel for up to `kernel_rows` rows."""
    arguments = (
        WEIGHT_C_TYPES[layout.weight_type],
        SCALE_C_TYPES[layout.scale_type or "float32"],
        str(layout.group_size or 0),
        "true" if layout.is_symmetric else "false",
        str(kernel_rows),
        str(stages),
        _host_sizes(layout, kernel_rows),
    )
    return f"gemv<{', '.join(arguments)}>"


def _host_sizes(layout: TileLayout, kernel_rows: int) -> str:
    """The sizes of shared memory that this file assumes, for the compiler to compare: HostSizes of gemv.cu."""
    sizes = (
        _slot_bytes(layout),
        _span_bytes(layout, kernel_rows),
        _num_sums(layout, kernel_rows),
        _num_buffers(kernel_rows),
        _TILE_WARPS[layout.weight_type],
    )
    return f"HostSizes<{', '.join(map(str, sizes))}>"


def gemv(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """Multiply; `out` is written ("store"), added to ("add"), or gets silu(gate) * up of each tile's halves ("swiglu").

    May start before the previous kernel has ended, and then reads the matrix at once: that kernel must not write it.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; out float32 [num_rows, num_outputs], alike, where
            num_outputs ends in the last tile, each of 16 outputs or, for "swiglu", 8; norm_weight float32 [num_inputs];
            bias float32 [16 * num_tiles]
    Raises: ValueError
    """
    layout = matrix.layout
    num_rows = x.shape[0]
    tile_outputs = HALF_ROWS if epilogue == "swiglu" else TILE_ROWS
    check("gemv", "x", x, dtype="float32", shape=(None, layout.num_inputs), row_stride=True, aligned=4)
    check("gemv", "out", out, dtype="float32", shape=(num_rows, None), row_stride=True, aligned=4)
    if -(-out.shape[1] // tile_outputs) != layout.num_tiles:
        raise ValueError(f"gemv: out has {out.shape[1]} columns, expected {layout.num_tiles} tiles of {tile_outputs}")
    if norm_weight is not None:
        check("gemv", "norm_weight", norm_weight, dtype="float32", shape=(layout.num_inputs,))
    if bias is not None:
        check("gemv", "bias", bias, dtype="float32", shape=(layout.padded_rows,), aligned=4)
    begin = 0
    for plan in plan_passes(
        layout,
        num_rows,
        num_multiprocessors=device.num_multiprocessors,
        shared_bytes_per_block=device.shared_bytes_per_block,
        can_cluster=device.can_cluster,
    ):
        end = begin + plan.num_rows
        shape = GemvShape(
            num_rows=plan.num_rows,
            num_inputs=layout.num_inputs,
            num_outputs=out.shape[1],
            x_stride=x.strides[0] // 4,
            out_stride=out.strides[0] // 4,
            chunk_spans=plan.chunk_spans,
            epilogue=EPILOGUES.index(epilogue),
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
            cost=partial(
                gemv_cost, plan, layout, epilogue=epilogue, has_norm=norm_weight is not None, has_bias=bias is not None
            ),
        )
        begin = end


@dataclass(frozen=True, kw_only=True)
class GemvCost(KernelCost):
    """The cost of one launch, and how its work is shared out, which decides its waits other than for memory."""

    plan: GemvPlan
    layout: TileLayout


def gemv_cost(
    plan: GemvPlan, layout: TileLayout, *, epilogue: Epilogue = "store", has_norm: bool = False, has_bias: bool = False
) -> GemvCost:
    """What one launch moves: the matrix and x once (each cluster reads x again, from L2), the results."""
    num_rows = plan.num_rows
    num_outputs = layout.num_rows // (2 if epilogue == "swiglu" else 1)
    out_bytes = 4 * num_rows * num_outputs
    stored_bytes = layout.num_bytes + 4 * (layout.num_inputs * has_norm + layout.padded_rows * has_bias)
    return GemvCost(
        read_bytes=stored_bytes + 4 * num_rows * layout.num_inputs + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes,
        flops=2 * num_rows * layout.num_rows * layout.num_inputs,
        stored_bytes=stored_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
        plan=plan,
        layout=layout,
    )


def _groups_per_span(layout: TileLayout) -> int:
    return max(1, layout.span_inputs // layout.group_size) if layout.group_size else 1


def _groups_across_lanes(layout: TileLayout) -> int:
    return min(4, max(1, layout.unit_inputs // layout.group_size)) if layout.group_size else 1


def _num_buffers(kernel_rows: int) -> int:
    """NUM_BUFFERS of gemv.cu: sums of tiles that wait for their turn."""
    return 2 if kernel_rows > 2 else 4


def _span_bytes(layout: TileLayout, kernel_rows: int) -> int:
    """SPAN_VECTORS of common/product_*.cuh: bytes of one span's inputs in shared memory."""
    if layout.has_codes:
        scales_bytes = 16 * (-(-kernel_rows // 4) if layout.is_symmetric else kernel_rows * _groups_per_span(layout))
        return kernel_rows * 2 * layout.span_inputs + scales_bytes
    if layout.weight_type == "fp8":
        return kernel_rows * 4 * layout.span_inputs + 16 * -(-kernel_rows // 4)
    return kernel_rows * {"float32": 64, "bfloat16": 128, "float16": 144}[layout.weight_type]


def _column_tiles(layout: TileLayout, kernel_rows: int) -> int:
    """COLUMN_TILES of common/product_*.cuh."""
    if layout.has_codes:
        return -(-kernel_rows * _groups_across_lanes(layout) // 4)
    return -(-kernel_rows // 4)


def _num_sums(layout: TileLayout, kernel_rows: int) -> int:
    """NUM_SUMS of common/product_*.cuh: the sums of one tile in a lane."""
    if layout.weight_type == "float32":
        return 2 * kernel_rows
    return (4 if layout.weight_type == "bfloat16" else 2) * _column_tiles(layout, kernel_rows)


def _slot_bytes(layout: TileLayout) -> int:
    """SLOT_BYTES of common/span_stream.cuh: a span with its scales and zero points, in lines of 128 bytes."""
    codes_bytes = UNIT_BYTES * SPAN_UNITS[layout.weight_type]
    if layout.group_size is None:
        return codes_bytes
    scales_bytes = layout.scales_bytes // (layout.num_tiles * layout.num_groups)  # of a group
    zero_points_bytes = 0 if layout.is_symmetric else TILE_ROWS
    num_bytes = codes_bytes + _groups_per_span(layout) * (scales_bytes + zero_points_bytes)
    return -(-num_bytes // 128) * 128


def _variant(
    weight_type: str,
    rows: int,
    stages: int,
    *,
    group_size: int | None = None,
    scale_type: str | None = None,
    is_symmetric: bool = True,
) -> str:
    layout = TileLayout(weight_type, TILE_ROWS, 8192, group_size, scale_type, is_symmetric)
    return gemv_name(layout, rows, stages)


SPEC = KernelSpec(
    "gemv",
    "few rows times a tiled matrix, with norm, bias and residual or SwiGLU",
    (
        *(_variant("int8", rows, 4, group_size=128, scale_type="bfloat16") for rows in _ROWS),
        *(_variant("int4", rows, 5, group_size=128, scale_type="bfloat16") for rows in _ROWS),
        *(_variant(weight_type, rows, 6) for weight_type in ("float16", "float32") for rows in (1, 8)),
        *(_variant("fp8", rows, 4, group_size=128, scale_type="bfloat16") for rows in _ROWS),
        *(_variant("fp8", rows, 4, scale_type="float32") for rows in (1, 8)),
        _variant("fp8", 8, 2, group_size=128, scale_type="float32"),
        *(_variant("fp8", rows, 4, group_size=128, scale_type="block") for rows in _ROWS),
        _variant("fp8", 8, 2, group_size=128, scale_type="block"),
        _variant("int8", 1, 4, scale_type="bfloat16"),
        _variant("bfloat16", 1, 6),
        _variant("bfloat16", 8, 5),
        _variant("bfloat16", 8, 3),
        _variant("int8", 8, 2, group_size=128, scale_type="bfloat16"),
        _variant("int4", 8, 2, group_size=128, scale_type="bfloat16"),
        _variant("int8", 1, 2, group_size=8, scale_type="float32", is_symmetric=False),
        _variant("int8", 8, 5, group_size=32, scale_type="float32", is_symmetric=False),
        _variant("int8", 1, 2, group_size=4096, scale_type="float32", is_symmetric=False),
        _variant("int4", 1, 5, group_size=32, scale_type="float16"),
        _variant("int4", 1, 2, group_size=16, scale_type="float32", is_symmetric=False),
        _variant("int4", 8, 2, group_size=16, scale_type="float32", is_symmetric=False),
    ),
)
