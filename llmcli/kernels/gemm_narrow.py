"""The forms of kernels/gemm_narrow.cu. gemm_wide launches it for few tokens, with the same results."""

from llmcli.kernels.spec import KernelSpec
from llmcli.kernels.tiles import (
    SCALE_C_TYPES,
    SCALE_DTYPES,
    TILE_ROWS,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TileLayout,
)
from llmcli.kernels.wide_plan import (
    NARROW_FORMS,
    SPAN_INPUTS,
    NarrowForm,
    all_layouts,
    is_plain,
)

STATIC_SHARED_BYTES = 1024
_SHARED_BYTES = 228 * 1024  # of a multiprocessor; the driver takes some for each block
_RESERVED_BYTES = 1024
_LEAST_STAGES, _MAX_STAGES, _MAX_SLOTS = 2, 4, 8  # spans of tokens, and of a warp's weights, being copied at once
_LEAST_RING_BYTES = 6240  # of a warp's weights: three slots of int8
_MOST_GROUPS = 8  # of a span


def kernel_name(layout: TileLayout, form: NarrowForm) -> str:
    """The name expression for blocks of a form."""
    types = f"{WEIGHT_C_TYPES[layout.weight_type]}, {SCALE_C_TYPES[layout.scale_type or 'float32']}"
    block = form.tokens, form.tiles, form.blocks, *_rings(layout, form)
    return f"gemm_narrow<{types}, {str(is_plain(layout)).lower()}, {', '.join(map(str, block))}>"


def block_size(form: NarrowForm) -> int:
    """Threads of a block: a warp for each tile, and four more, one of which copies tokens."""
    return 32 * (form.tiles + 4)


def shared_bytes(layout: TileLayout, form: NarrowForm) -> int:
    """Bytes of dynamic shared memory of a block."""
    return _rings(layout, form)[2]


def _slot_bytes(layout: TileLayout) -> int:
    """Bytes of a tile's span of weights, with room for the most scales and zero points that it may have."""
    num_bytes = TILE_ROWS * SPAN_INPUTS * WEIGHT_BITS[layout.weight_type] // 8
    if layout.scale_type is None:
        return num_bytes
    scale_bytes = SCALE_DTYPES[layout.scale_type].itemsize
    return num_bytes + TILE_ROWS * (scale_bytes if is_plain(layout) else _MOST_GROUPS * (scale_bytes + 1))


def _rings(layout: TileLayout, form: NarrowForm) -> tuple[int, int, int]:
    """Stages of tokens, slots of weights, and the bytes of both."""
    room = _SHARED_BYTES // form.blocks - _RESERVED_BYTES - STATIC_SHARED_BYTES
    stage_bytes, slot_bytes = 2 * SPAN_INPUTS * form.tokens, form.tiles * _slot_bytes(layout)
    # Weights need two slots, so that some are being copied, and more if these are small.
    stages = (room - max(2 * slot_bytes, form.tiles * _LEAST_RING_BYTES)) // stage_bytes
    stages = max(_LEAST_STAGES, min(stages, _MAX_STAGES))
    slots = min(_MAX_SLOTS, (room - stages * stage_bytes) // slot_bytes)
    return stages, slots, stages * stage_bytes + slots * slot_bytes


SPEC = KernelSpec(
    "gemm_narrow",
    "up to 64 tokens in fp16 times a tiled matrix of 4 to 16 bits, with bias, residual sum or SwiGLU, on sm_90",
    tuple(dict.fromkeys(kernel_name(layout, form) for layout in all_layouts() for form in NARROW_FORMS)),
    only_arch="sm_90",
)
