"""y = f(x @ W.T + bias) for a few rows and a tiled matrix: the products of decoding."""

import ctypes
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from llmcli.kernels.arguments import c_type, check, struct_fields
from llmcli.kernels.chunks import num_chunks, num_spans
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.tiles import (
    BLOCK_SCALE,
    HALF_ROWS,
    SCALE_DTYPES,
    TILE_ROWS,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    WIDENINGS,
    TiledMatrix,
    TileLayout,
    Widening,
    fastest_widening,
    scale_c_type,
)

Epilogue = Literal["store", "add", "swiglu"]

MAX_ROWS = 8
GATED_SCALE = 16.0  # of common/silu.cuh: SwiGLU's results are stored in fp16, divided by it
EPILOGUES: tuple[Epilogue, ...] = ("store", "add", "swiglu")
STATIC_SHARED_BYTES = 512  # barriers and scales; what follows is aligned to 128
_WARPS = (16, 12, 8, 4)  # a kernel for each
_FEWEST_SLOTS, _MOST_SLOTS = 2, (5, 3)  # of one span and of two: more under way do not arrive sooner (measured)
_BUFFERS = 2
_SHORT_CHUNK = 8  # spans
# More than half of a large card's: else blocks of the next kernel gather on some multiprocessors. A block of attention
# should fit next to it (50 KiB): then o's weights come while attention runs.
_HALF_SHARED = 118 * 1024


class GemvShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = struct_fields(
        "num_rows num_inputs num_outputs num_groups group_shift x_stride out_stride adds chunk_shift "
        "num_buffers next_stride block_tiles longer_blocks",
        "eps inverse_inputs power",
    )


class GemvFloatShape(ctypes.Structure):
    """The struct of the same name in gemv_float.cu."""

    _fields_ = struct_fields("num_rows num_inputs num_outputs x_stride out_stride epilogue", "eps")


@dataclass(frozen=True)
class RowNorm:
    """The norm of rows of x that hold hidden * weight: its factor multiplies the outputs.

    Shapes: sums float32 [num_rows, norm_sums(num_inputs)], of each 16 inputs the sum of squares of `hidden` and the
            largest magnitude of x, zeros past the last input; hidden float32 [num_rows, num_inputs]; weight float32
            [num_inputs]
    """

    sums: Any
    hidden: Any
    weight: Any
    eps: float


def norm_sums(num_inputs: int) -> int:
    """The floats of a row's sums (common/norm_sums.cuh)."""
    return 4 * -(-num_inputs // (2 * TILE_ROWS))


@dataclass(frozen=True)
class NextRows:
    """Where an "add" also writes what the next product takes: out * weight in fp16, and the sums of its norm.

    Shapes: weight float32 [num_outputs]; x float16 [num_rows, at least num_outputs]; sums as RowNorm has them
    """

    weight: Any
    x: Any
    sums: Any


@dataclass(frozen=True)
class GemvPlan:
    """How a product is launched. No choice in it changes a bit of the result.

    `num_rows` rows go into one launch. A block has `warps` warps, each with a ring of `slots` slots of `spans` spans.
    `cluster` blocks halve the chunks between them; sums of `buffers` tiles wait at a time.
    """

    num_rows: int
    warps: int
    slots: int
    spans: int
    cluster: int
    num_blocks: int
    buffers: int
    shared_bytes: int


@cache
def plan_gemv(
    layout: TileLayout,
    num_rows: int,
    chunks: int,
    *,
    widening: Widening,
    num_multiprocessors: int,
    shared_bytes_per_block: int,
    can_cluster: bool,
) -> GemvPlan:
    """The launch for up to 8 rows: the most that fit into a block's shared memory, then the deepest rings.

    Raises: ValueError for a card with too little shared memory for one row
    """
    room = shared_bytes_per_block - STATIC_SHARED_BYTES
    for rows in range(min(num_rows, MAX_ROWS), 0, -1):
        plans = [
            plan
            for cluster in ((1, 2) if can_cluster and chunks > 1 else (1,))
            if (plan := _plan(layout, widening, rows, chunks, cluster, num_multiprocessors, room))
        ]
        if plans:
            return max(plans, key=lambda plan: (plan.warps * min(plan.slots, 4), -plan.cluster))
    raise ValueError(f"gemv: {shared_bytes_per_block} bytes of shared memory a block are too few")


def _plan(
    layout: TileLayout, widening: Widening, rows: int, chunks: int, cluster: int, num_multiprocessors: int, room: int
) -> GemvPlan | None:
    """Of the plans whose rings fit, the one with the most warps that have work."""
    own_chunks = chunks // cluster
    num_clusters = min(num_multiprocessors // cluster, layout.num_tiles)
    busiest = -(-layout.num_tiles // num_clusters)
    wanted = min(one for one in _WARPS if one >= min(busiest * own_chunks, max(_WARPS)))
    x_bytes = rows * (-(-num_spans(layout) // cluster) * 256 + 64)
    for warps in (one for one in _WARPS if wanted >= one >= own_chunks):
        parts = warps // own_chunks
        local_tiles = -(-layout.num_tiles // (parts * num_clusters))
        buffers = _BUFFERS if cluster == 1 else local_tiles
        if cluster > 1 and buffers > _BUFFERS:
            continue
        fixed = x_bytes + parts * buffers * chunks * rows * TILE_ROWS * 4
        for spans in range(_spans_a_slot(layout, warps, chunks), 0, -1):
            bytes_a_slot = warps * slot_bytes(layout, widening, spans)
            of_warp = local_tiles * -(-num_spans(layout) // (chunks * spans))  # slots in all
            slots = min((room - fixed) // bytes_a_slot, _MOST_SLOTS[spans - 1], max(of_warp, _FEWEST_SLOTS))
            if slots >= _FEWEST_SLOTS:
                shared_bytes = max(fixed + slots * bytes_a_slot, min(_HALF_SHARED, room))
                return GemvPlan(rows, warps, slots, spans, cluster, num_clusters * cluster, buffers, shared_bytes)
    return None


def _spans_a_slot(layout: TileLayout, warps: int, chunks: int) -> int:
    """Two, if they are short, if few warps have slots, or if a chunk ends soon; one where slots would be too few."""
    of_chunk, is_even = num_spans(layout) // chunks, num_spans(layout) % (2 * chunks) == 0
    gains = layout.weight_type == "int4" or (layout.has_scales and (warps < max(_WARPS) or of_chunk <= _SHORT_CHUNK))
    return 2 if gains and is_even else 1


def slot_bytes(layout: TileLayout, widening: Widening, spans: int = 1) -> int:
    """WeightSlot::BYTES of common/weight_slot.cuh: spans with their scales and zero points, in lines of 128 bytes."""
    num_bytes = TILE_ROWS * 128 * WEIGHT_BITS[layout.weight_type] // 8
    if layout.scale_type is not None:
        is_block = layout.scale_type == BLOCK_SCALE
        groups = 1 if widening == "lifted" or is_block else 8
        num_bytes += groups * (2 if is_block else TILE_ROWS) * SCALE_DTYPES[layout.scale_type].itemsize
        num_bytes += groups * TILE_ROWS * (layout.has_codes and widening != "lifted")
    return -(-spans * num_bytes // 128) * 128


def gemv_name(
    layout: TileLayout, widening: Widening, rows: int, is_gated: bool, warps: int, slots: int, spans: int, cluster: int
) -> str:
    """The name expression; its last parameter is a size, for the compiler to compare."""
    arguments = (
        WEIGHT_C_TYPES[layout.weight_type],
        scale_c_type(layout, widening),
        str(WIDENINGS.index(widening)),
        str(1 if rows == 1 else MAX_ROWS),
        str(is_gated).lower(),
        *map(str, (warps, slots, spans, cluster, slot_bytes(layout, widening, spans))),
    )
    return f"gemv<{', '.join(arguments)}>"


def gemv(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    row_scales: Any | None = None,
    norm: RowNorm | None = None,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
    next_rows: NextRows | None = None,
) -> None:
    """Multiply; `out` is written ("store"), added to ("add"), or gets silu(gate) * up of each tile's halves ("swiglu").

    x is as stage_wide writes it, or as the `next_rows` of a product before: scaled by `row_scales`, by `norm`, or by 1.
    "swiglu" divides by GATED_SCALE.
    May start before the previous kernel has ended, and then reads the matrix at once: that kernel must not write it.
    Shapes: x float16 [num_rows, num_inputs], rows any distance apart; row_scales float32 [num_rows]; out float32, for
            "swiglu" float16, [num_rows, num_outputs], alike, where num_outputs ends in the last tile, each of 16
            outputs or, for "swiglu", 8; bias float32 [16 * num_tiles]
    Raises: ValueError
    """
    layout = matrix.layout
    num_rows, is_gated = x.shape[0], epilogue == "swiglu"
    check("gemv", "x", x, dtype="float16", shape=(None, layout.num_inputs), row_stride=True, aligned=16)
    if num_rows > 1 and x.strides[0] % 16:
        raise ValueError(f"gemv: rows of x lie {x.strides[0]} bytes apart, expected a multiple of 16")
    _check_outputs("gemv", layout, out, num_rows, bias, is_gated, "float16" if is_gated else "float32")
    if row_scales is not None:
        check("gemv", "row_scales", row_scales, dtype="float32", shape=(num_rows,), aligned=4)
    if norm is not None:
        _check_norm(norm, num_rows, layout.num_inputs)
    if next_rows is not None:
        _check_next(next_rows, num_rows, out.shape[1], epilogue)
    chunks = num_chunks(layout, is_gated=is_gated)
    begin = 0
    while begin < num_rows:
        plan = plan_gemv(
            layout,
            min(num_rows - begin, MAX_ROWS),
            chunks,
            widening=matrix.widening,
            num_multiprocessors=device.num_multiprocessors,
            shared_bytes_per_block=device.shared_bytes_per_block,
            can_cluster=device.can_cluster,
        )
        some = slice(begin, begin + plan.num_rows)
        block_tiles, longer_blocks = divmod(layout.num_tiles, plan.num_blocks // plan.cluster)
        shape = GemvShape(
            num_rows=plan.num_rows,
            num_inputs=layout.num_inputs,
            num_outputs=out.shape[1],
            num_groups=layout.num_groups,
            group_shift=layout.group_size.bit_length() - 1 if layout.group_size else 31,
            x_stride=x.strides[0] // x.dtype.itemsize,
            out_stride=out.strides[0] // out.dtype.itemsize,
            adds=epilogue == "add",
            chunk_shift=chunks.bit_length() - 1,
            num_buffers=plan.buffers,
            next_stride=0 if next_rows is None else next_rows.x.strides[0] // 2,
            block_tiles=block_tiles,
            longer_blocks=longer_blocks,
            eps=0.0 if norm is None else norm.eps,
            inverse_inputs=1.0 / layout.num_inputs,
            power=2.0**matrix.power,
        )
        device.launch(
            "gemv",
            gemv_name(
                layout, matrix.widening, plan.num_rows, is_gated, plan.warps, plan.slots, plan.spans, plan.cluster
            ),
            grid=(plan.num_blocks,),
            block=32 * plan.warps,
            arguments=(
                *(matrix.tiles, matrix.scales, matrix.zero_points),
                *(x[some], None if row_scales is None else row_scales[some]),
                *((None, None, None) if norm is None else (norm.sums[some], norm.hidden[some], norm.weight)),
                *(bias, out[some]),
                *((None,) * 3 if next_rows is None else (next_rows.weight, next_rows.x[some], next_rows.sums[some])),
                shape,
            ),
            shared_bytes=plan.shared_bytes,
            overlaps=True,
            cost=partial(
                gemv_cost,
                layout,
                plan.num_rows,
                epilogue=epilogue,
                has_norm=norm is not None,
                has_bias=bias is not None,
                has_next=next_rows is not None,
            ),
        )
        begin += plan.num_rows


def gemv_float(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    row_scales: Any | None = None,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """Multiply by weights of 32 bits, all in fp32, and norm x inside: the same otherwise as `gemv`.

    Shapes: x float32 or float16 [num_rows, num_inputs], out float32 [num_rows, num_outputs], rows any distance apart;
            row_scales float32 [num_rows]; norm_weight float32 [num_inputs]
    Raises: ValueError
    """
    layout = matrix.layout
    check(
        "gemv_float", "x", x, dtype=("float32", "float16"), shape=(None, layout.num_inputs), row_stride=True, aligned=2
    )
    _check_outputs("gemv_float", layout, out, len(x), bias, epilogue == "swiglu", "float32")
    if row_scales is not None:
        check("gemv_float", "row_scales", row_scales, dtype="float32", shape=(len(x),), aligned=4)
    if norm_weight is not None:
        check("gemv_float", "norm_weight", norm_weight, dtype="float32", shape=(layout.num_inputs,))
    for begin in range(0, len(x), MAX_ROWS):
        some = slice(begin, min(begin + MAX_ROWS, len(x)))
        shape = GemvFloatShape(
            num_rows=some.stop - begin,
            num_inputs=layout.num_inputs,
            num_outputs=out.shape[1],
            x_stride=x.strides[0] // x.dtype.itemsize,
            out_stride=out.strides[0] // 4,
            epilogue=EPILOGUES.index(epilogue),
            eps=eps,
        )
        scales = None if row_scales is None else row_scales[some]
        device.launch(
            "gemv_float",
            f"gemv_float<{c_type(x)}>",
            grid=(layout.num_tiles,),
            block=256,
            arguments=(matrix.tiles, x[some], scales, norm_weight, bias, out[some], shape),
            overlaps=True,
            cost=partial(
                gemv_cost,
                layout,
                shape.num_rows,
                epilogue=epilogue,
                has_norm=norm_weight is not None,
                has_bias=bias is not None,
            ),
        )


def _check_outputs(
    kernel: str, layout: TileLayout, out: Any, num_rows: int, bias: Any | None, is_gated: bool, dtype: str
) -> None:
    check(kernel, "out", out, dtype=dtype, shape=(num_rows, None), row_stride=True, aligned=out.dtype.itemsize)
    tile_outputs = HALF_ROWS if is_gated else TILE_ROWS
    if -(-out.shape[1] // tile_outputs) != layout.num_tiles:
        raise ValueError(
            f"{kernel}: out has {out.shape[1]} columns, expected {layout.num_tiles} tiles of {tile_outputs}"
        )
    if bias is not None:
        check(kernel, "bias", bias, dtype="float32", shape=(layout.padded_rows,), aligned=4)


def _check_norm(norm: RowNorm, num_rows: int, num_inputs: int) -> None:
    if num_inputs % 8:
        raise ValueError(f"gemv: a norm of {num_inputs} inputs, expected a multiple of 8")
    check("gemv", "norm.sums", norm.sums, dtype="float32", shape=(num_rows, norm_sums(num_inputs)))
    check("gemv", "norm.hidden", norm.hidden, dtype="float32", shape=(num_rows, num_inputs))
    check("gemv", "norm.weight", norm.weight, dtype="float32", shape=(num_inputs,))


def _check_next(rows: NextRows, num_rows: int, num_outputs: int, epilogue: Epilogue) -> None:
    if epilogue != "add":
        raise ValueError(f"gemv: the epilogue is {epilogue}, expected add where next_rows are written")
    check("gemv", "next_rows.weight", rows.weight, dtype="float32", shape=(num_outputs,))
    check("gemv", "next_rows.x", rows.x, dtype="float16", shape=(num_rows, num_outputs), row_stride=True, aligned=16)
    check("gemv", "next_rows.sums", rows.sums, dtype="float32", shape=(num_rows, norm_sums(num_outputs)))


def gemv_cost(
    layout: TileLayout,
    num_rows: int,
    *,
    epilogue: Epilogue = "store",
    has_norm: bool = False,
    has_bias: bool = False,
    has_next: bool = False,
) -> KernelCost:
    """What one launch moves: the matrix and x once (each block reads x again, from L2), the results."""
    num_outputs, is_float = layout.num_rows // (2 if epilogue == "swiglu" else 1), layout.weight_type == "float32"
    out_bytes = num_rows * num_outputs * (2 if epilogue == "swiglu" and not is_float else 4)
    norm_bytes = has_norm * (4 * layout.num_inputs if is_float else num_rows * layout.num_inputs // 2)
    stored_bytes = layout.num_bytes + 4 * (layout.padded_rows * has_bias + num_outputs * has_next)
    x_bytes = num_rows * layout.num_inputs * (4 if is_float else 2)
    return KernelCost(
        read_bytes=stored_bytes + x_bytes + norm_bytes + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes + has_next * num_rows * (2 * num_outputs + num_outputs // 2),
        flops=2 * num_rows * layout.num_rows * layout.num_inputs,
        stored_bytes=stored_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
    )


def _variants() -> list[str]:
    """Kernels of usual models on usual cards, and of every type."""
    layouts = [
        *(TileLayout(one, TILE_ROWS, 8192, 128, "bfloat16") for one in ("int8", "int4", "fp8")),
        TileLayout("int8", TILE_ROWS, 8192, None, "float16"),
        TileLayout("int8", TILE_ROWS, 8192, 32, "float32", is_symmetric=False),
        TileLayout("int4", TILE_ROWS, 8192, 32, "float16", is_symmetric=False),
        TileLayout("fp8", TILE_ROWS, 8192, 128, BLOCK_SCALE),
        TileLayout("float16", TILE_ROWS, 8192),
        TileLayout("bfloat16", TILE_ROWS, 8192),
    ]
    forms = ((1, False, 16, 3, 2, 1), (1, True, 16, 5, 1, 1), (8, False, 16, 3, 2, 1), (8, False, 8, 3, 2, 2))
    names = [gemv_name(layout, fastest_widening(layout), *form) for layout in layouts for form in forms]
    return [*names, *(gemv_name(layout, "floats", 1, False, 16, 3, 2, 1) for layout in layouts[:2])]


SPEC = KernelSpec(
    "gemv",
    "few rows times a tiled matrix of 4 to 16 bits, with bias and residual or SwiGLU",
    tuple(dict.fromkeys(_variants())),
)
FLOAT_SPEC = KernelSpec(
    "gemv_float", "few rows times a tiled matrix of 32 bits, all in fp32", ("gemv_float<float>", "gemv_float<__half>")
)
