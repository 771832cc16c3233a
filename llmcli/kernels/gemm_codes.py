"""y = f(x' @ W.T + bias) for nine and more rows, staged as digits, and a tiled matrix of codes: gemv's bits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcli.kernels.gemv import Epilogue
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_digits import TOKENS, image_bytes, span_bytes, tokens_of
from llmcli.kernels.staged_rows import check_product
from llmcli.kernels.tiles import (
    SCALE_C_TYPES,
    SPAN_UNITS,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
)

BLOCK_TILES, SPLITS = 8, 4  # tiles of a block; blocks that share their inputs, each a quarter of gemv's chunks
_CONSUMERS = 32 * BLOCK_TILES  # threads that multiply, a warp for each tile
BLOCK_SIZE = _CONSUMERS + 32  # one more warp copies
_MAX_STAGES = 6
STATIC_SHARED_BYTES = 128


def takes(layout: TileLayout) -> bool:
    """Whether the kernel takes such a matrix: codes in groups of whole spans, or with one scale a row."""
    return layout.has_codes and (layout.group_size is None or layout.group_size >= layout.span_inputs)


def gemm_codes(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    image: Any,
    factors: Any,
    out: Any,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """Multiply the digits that stage_digits wrote; `out`, `bias`, `epilogue` and all bits as in gemv.

    May start before the previous kernel has ended, and then reads the matrix at once: that kernel must not write it.
    Shapes: image uint8 [at least image_bytes]; factors float32 [num_rows]; out float32 [num_rows, num_outputs];
            bias float32 [16 * num_tiles]
    Raises: ValueError, also for a matrix that it does not take, and on a card without wgmma
    """
    layout = matrix.layout
    num_rows = out.shape[0]
    shape = check_product(
        "gemm_codes",
        device,
        layout,
        is_taken=takes(layout),
        image=image,
        image_bytes=image_bytes(layout, num_rows),
        factors=factors,
        out=out,
        bias=bias,
        epilogue=epilogue,
    )
    tokens = tokens_of(layout, num_rows)
    stages = choose_stages(layout, tokens, device.shared_bytes_per_block)
    device.launch(
        "gemm_codes",
        kernel_name(layout, tokens, stages),
        grid=(SPLITS, -(-num_rows // tokens), -(-layout.num_tiles // BLOCK_TILES)),
        block=BLOCK_SIZE,
        arguments=(matrix.tiles, matrix.scales, matrix.zero_points, image, factors, bias, out, shape),
        shared_bytes=_shared_bytes(layout, tokens, stages),
        overlaps=True,
        cost=partial(gemm_codes_cost, layout, num_rows, epilogue=epilogue, has_bias=bias is not None),
    )


def choose_stages(layout: TileLayout, tokens: int, shared_bytes_per_block: int) -> int:
    """Spans being copied at once, such that two blocks fit on a multiprocessor."""
    room = (shared_bytes_per_block + 1024) // 2 - 1024 - STATIC_SHARED_BYTES
    fixed = _shared_bytes(layout, tokens, 0)
    return max(2, min((room - fixed) // _stage_bytes(layout, tokens), _MAX_STAGES))


def kernel_name(layout: TileLayout, tokens: int, stages: int) -> str:
    """The name expression; its last parameter is the size of a stage, for the compiler to compare."""
    parameters = (
        WEIGHT_C_TYPES[layout.weight_type],
        SCALE_C_TYPES[layout.scale_type or "float32"],
        str(layout.group_size or 0),
        "true" if layout.is_symmetric else "false",
        str(tokens),
        str(stages),
        str(_stage_bytes(layout, tokens)),
    )
    return f"gemm_codes<{', '.join(parameters)}>"


@dataclass(frozen=True, kw_only=True)
class CodesCost(KernelCost):
    """The cost of one call, and what decides how long the tensor cores take."""

    layout: TileLayout
    num_rows: int


def gemm_codes_cost(
    layout: TileLayout, num_rows: int, *, epilogue: Epilogue = "store", has_bias: bool = False
) -> CodesCost:
    """What one call moves: the matrix and the digits once (re-reads are L2's), the results."""
    out_bytes = 4 * num_rows * layout.num_rows // (2 if epilogue == "swiglu" else 1)
    stored_bytes = layout.num_bytes + 4 * layout.padded_rows * has_bias
    return CodesCost(
        read_bytes=stored_bytes + image_bytes(layout, num_rows) + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes,
        flops=2 * num_rows * layout.num_rows * layout.num_inputs,
        stored_bytes=stored_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
        layout=layout,
        num_rows=num_rows,
    )


def _shared_bytes(layout: TileLayout, tokens: int, stages: int) -> int:
    return stages * _stage_bytes(layout, tokens) + 16 * _CONSUMERS * tokens // 8


def _stage_bytes(layout: TileLayout, tokens: int) -> int:
    scale_bytes = 0
    if layout.group_size is not None:
        scale_bytes = TILE_ROWS * (layout.scales_bytes // (layout.padded_rows * layout.num_groups))
    zero_bytes = 0 if layout.is_symmetric else TILE_ROWS
    return _lines(span_bytes(layout, tokens)) + BLOCK_TILES * _lines(
        UNIT_BYTES * SPAN_UNITS[layout.weight_type] + scale_bytes + zero_bytes
    )


def _lines(num_bytes: int) -> int:
    """Round up to lines of 128 bytes."""
    return -(-num_bytes // 128) * 128


SPEC = KernelSpec(
    "gemm_codes",
    "nine and more rows, as digits, times a tiled matrix of codes, on sm_90",
    tuple(
        kernel_name(layout, tokens, choose_stages(layout, tokens, 227 * 1024))
        for weight_type in ("int8", "int4")
        for scale_type, group_size, is_symmetric in (
            ("float32", None, True),
            ("bfloat16", 128, True),
            ("float16", 128, False),
        )
        for layout in (TileLayout(weight_type, TILE_ROWS, 8192, group_size, scale_type, is_symmetric),)
        for tokens in TOKENS
        if tokens == tokens_of(layout, tokens)
    ),
    only_arch="sm_90",
)
