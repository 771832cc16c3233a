"""How gemm_mma is launched, which multiplies many tokens with scales of blocks, and on cards without wgmma."""

from dataclasses import dataclass
from functools import cache

from llmcli.kernels.chunks import SPAN_INPUTS
from llmcli.kernels.gemv import slot_bytes
from llmcli.kernels.spec import KernelSpec
from llmcli.kernels.stage_wide import IMAGE_TOKENS
from llmcli.kernels.tiles import (
    BLOCK_SCALE,
    TILE_ROWS,
    WEIGHT_C_TYPES,
    WIDENINGS,
    TileLayout,
    Widening,
    fastest_widening,
    scale_c_type,
)
from llmcli.kernels.wide_plan import all_forms

STATIC_SHARED_BYTES = 1024
BLOCK_SIZE = 256
_TILES = 8  # of a block, a warp each
TOKENS = (64, IMAGE_TOKENS)  # of a block
_MOST_STAGES = 4
_SPAN_TILES = 16  # whose results, of SwiGLU, are a span of the next product's inputs


@dataclass(frozen=True)
class MmaPlan:
    """A block a multiprocessor, of `tokens` tokens with `stages` spans in shared memory. No choice changes a bit."""

    tokens: int
    stages: int
    num_blocks: int
    shared_bytes: int


@cache
def plan_mma(
    layout: TileLayout,
    widening: Widening,
    num_tokens: int,
    *,
    num_multiprocessors: int,
    shared_bytes_per_block: int,
    num_parts: int = 1,
) -> MmaPlan:
    """The launch whose blocks have the most tokens that are needed and fit, then the deepest ring.

    Raises: ValueError for a card with too little shared memory
    """
    room = shared_bytes_per_block - STATIC_SHARED_BYTES
    for tokens in sorted(TOKENS, reverse=num_tokens > min(TOKENS)):
        stages = min(room // stage_bytes(layout, widening, tokens), _MOST_STAGES)
        if stages >= 2:
            tile_blocks = _SPAN_TILES // _TILES * -(-layout.num_tiles // _SPAN_TILES)
            pieces = tile_blocks * -(-num_tokens // tokens) * num_parts
            shared_bytes = stages * stage_bytes(layout, widening, tokens)
            return MmaPlan(tokens, stages, min(pieces, num_multiprocessors), shared_bytes)
    raise ValueError(f"gemm_mma: {shared_bytes_per_block} bytes of shared memory a block are too few")


def stage_bytes(layout: TileLayout, widening: Widening, tokens: int) -> int:
    """Bytes of a span of tokens and of a block's tiles."""
    return 2 * SPAN_INPUTS * tokens + _TILES * slot_bytes(layout, widening)


def mma_name(layout: TileLayout, widening: Widening, tokens: int, stages: int) -> str:
    """The name expression; its last parameter is the size of shared memory, for the compiler to compare."""
    types = f"{WEIGHT_C_TYPES[layout.weight_type]}, {scale_c_type(layout, widening)}, {WIDENINGS.index(widening)}"
    return f"gemm_mma<{types}, {tokens}, {stages}, {stages * stage_bytes(layout, widening, tokens)}>"


_BLOCKS = TileLayout("fp8", TILE_ROWS, 4096, 128, BLOCK_SCALE)
SPEC = KernelSpec(
    "gemm_mma",
    "many tokens in fp16 times a tiled matrix of 4 to 16 bits, with bias, residual sum or SwiGLU, without wgmma",
    tuple(
        dict.fromkeys(
            mma_name(layout, widening, tokens, 2)
            for layout, widening in (*all_forms(), (_BLOCKS, fastest_widening(_BLOCKS)))
            for tokens in TOKENS
        )
    ),
)
