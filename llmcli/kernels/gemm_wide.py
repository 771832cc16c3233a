"""y = f(x @ W.T + bias) of many tokens, staged in fp16, and a tiled matrix of 4 to 16 bits, which it widens itself."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from llmcli.kernels.arguments import check, struct_fields
from llmcli.kernels.chunks import SPAN_INPUTS, num_spans
from llmcli.kernels.gemm_mma import BLOCK_SIZE as MMA_BLOCK_SIZE
from llmcli.kernels.gemm_mma import MmaPlan, mma_name, plan_mma
from llmcli.kernels.gemv import EPILOGUES, Epilogue, slot_bytes
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_wide import STEP_INPUTS, WIDE_TOKENS, check_image, image_bytes
from llmcli.kernels.tiles import (
    HALF_ROWS,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    WIDENINGS,
    TiledMatrix,
    TileLayout,
    Widening,
    scale_c_type,
)
from llmcli.kernels.wide_plan import (
    CLUSTER,
    MAX_NARROW_TOKENS,
    NARROW_FORMS,
    NarrowForm,
    NarrowPlan,
    WidePlan,
    all_forms,
    plan_narrow,
    plan_wide,
    takes,
    takes_wgmma,
)

BLOCK_SIZE = 384
STATIC_SHARED_BYTES = 3 * 1024
_STAGES = {128: 12, 256: 6}  # steps of tokens being copied at once
_ONE_GROUP = 31  # a shift that takes every input to group 0

# Of gemm_narrow, which multiplies few tokens, with the same results.
NARROW_STATIC_SHARED_BYTES = 1024
_MULTIPROCESSOR_BYTES = 228 * 1024  # shared memory; the driver takes some for each block
_RESERVED_BYTES = 1024
_LEAST_STAGES, _MAX_STAGES, _MAX_SLOTS = 2, 4, 8  # spans of tokens, and of a warp's weights, being copied at once
_LEAST_RING_BYTES = 6240  # of a warp's weights: three slots of int8


class WideShape(ctypes.Structure):
    """The struct of the same name in the kernel."""

    _fields_ = struct_fields(
        "num_tokens num_inputs num_outputs num_groups group_shift out_stride epilogue down_unit_inputs num_parts",
        "power",
    )


def gemm_wide(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    out: Any,
    bias: Any | None = None,
    epilogue: Literal["store", "add"] = "store",
    others: Any | None = None,
) -> None:
    """Write what stage_wide has staged, times the matrix, times `row_scales`, plus the bias; or add it to `out`.

    Few tokens are multiplied by gemm_narrow; with scales of blocks, and on cards without wgmma, all by gemm_mma. All
    give the same bits.
    With `others` the inputs are cut into one part more than these: `out` gets the first part's product, with the bias,
    and `others` get the rest. Their sum has other bits than the uncut product.
    Shapes: image uint8 [at least image_bytes]; row_scales float32 [num_tokens]; out float32 [num_tokens, num_rows],
            rows may be further apart; bias float32 [16 * num_tiles]; others float32 [parts - 1, num_tokens, num_rows]
    Raises: ValueError, also for a matrix that it does not take
    """
    num_tokens, layout = row_scales.shape[0], matrix.layout
    check("gemm_wide", "out", out, dtype=np.float32, shape=(num_tokens, layout.num_rows), row_stride=True, aligned=4)
    shape = _shape(device, matrix, image, row_scales, bias, layout.num_rows, epilogue)
    if others is not None:
        check("gemm_wide", "others", others, dtype=np.float32, shape=(None, num_tokens, layout.num_rows), aligned=4)
        shape.num_parts = 1 + len(others)
        if shape.num_parts > num_spans(layout):
            raise ValueError(
                f"gemm_wide: cannot cut {layout.num_inputs} inputs into {shape.num_parts} parts of 128 or more"
            )
    shape.out_stride = out.strides[0] // 4
    _launch(device, matrix, (image, row_scales, bias, out, others), shape)


def gemm_wide_swiglu(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    down: TileLayout,
    out: Any,
    bias: Any | None = None,
) -> None:
    """Write silu(gate) * up, over GATED_SCALE, as the image that is multiplied with a matrix of the layout `down`.

    `matrix` has gate in the first halves of its tiles and up in the others.
    Shapes: image as in gemm_wide; out uint8 [at least image_bytes of down's inputs], not `image`; row_scales float32
            [num_tokens]; bias float32 [16 * num_tiles]
    Raises: ValueError, as gemm_wide
    """
    num_tokens, layout = row_scales.shape[0], matrix.layout
    if -(-down.num_inputs // HALF_ROWS) != layout.num_tiles:
        raise ValueError(f"gemm_wide: {layout.num_tiles} tiles do not give {down.num_inputs} outputs")
    check_image("gemm_wide", "out", out, down.num_inputs, num_tokens)
    shape = _shape(device, matrix, image, row_scales, bias, down.num_inputs, "swiglu")
    shape.down_unit_inputs = down.unit_inputs
    _launch(device, matrix, (image, row_scales, bias, out, None), shape)


def _shape(
    device: Launcher,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    bias: Any | None,
    num_outputs: int,
    epilogue: Epilogue,
) -> WideShape:
    layout = matrix.layout
    if not takes(layout):
        raise ValueError(f"gemm_wide: does not take {layout}")
    num_tokens = row_scales.shape[0]
    check("gemm_wide", "row_scales", row_scales, dtype=np.float32, shape=(num_tokens,), aligned=4)
    check_image("gemm_wide", "image", image, layout.num_inputs, num_tokens)
    if bias is not None:
        check("gemm_wide", "bias", bias, dtype=np.float32, shape=(layout.padded_rows,), aligned=4)
    return WideShape(
        num_tokens=num_tokens,
        num_inputs=layout.num_inputs,
        num_outputs=num_outputs,
        num_groups=layout.num_groups,
        group_shift=layout.group_size.bit_length() - 1 if layout.group_size else _ONE_GROUP,
        epilogue=EPILOGUES.index(epilogue),
        num_parts=1,
        power=2.0**matrix.power,
    )


def _launch(device: Launcher, matrix: TiledMatrix, arguments: tuple[Any, ...], shape: WideShape) -> None:
    layout, num_tokens = matrix.layout, shape.num_tokens
    epilogue = EPILOGUES[shape.epilogue]
    cost: Callable[[], KernelCost] = partial(gemm_wide_cost, layout, num_tokens, epilogue, shape.num_parts)
    plan: NarrowPlan | WidePlan | MmaPlan
    if not (device.can_wgmma and takes_wgmma(layout)):
        plan = plan_mma(
            layout,
            matrix.widening,
            num_tokens,
            num_multiprocessors=device.num_multiprocessors,
            shared_bytes_per_block=device.shared_bytes_per_block,
            num_parts=shape.num_parts,
        )
        name, block = mma_name(layout, matrix.widening, plan.tokens, plan.stages), MMA_BLOCK_SIZE
        num_blocks, shared_bytes = plan.num_blocks, plan.shared_bytes
    elif num_tokens <= MAX_NARROW_TOKENS:
        plan = plan_narrow(layout, num_tokens, device.num_multiprocessors, shape.num_parts)
        name, block = narrow_name(layout, matrix.widening, plan.form), narrow_block_size(plan.form)
        num_blocks = plan.num_clusters * CLUSTER
        shared_bytes = narrow_shared_bytes(layout, matrix.widening, plan.form)
    else:
        plan = plan_wide(layout, num_tokens, device.num_multiprocessors, shape.num_parts)
        name, block = kernel_name(layout, matrix.widening, plan.tokens), BLOCK_SIZE
        num_blocks, shared_bytes = plan.num_clusters * CLUSTER, _shared_bytes(plan.tokens)
    device.launch(
        name.partition("<")[0],
        name,
        grid=(num_blocks,),
        block=block,
        arguments=(matrix.tiles, matrix.scales, matrix.zero_points, *arguments, shape),
        shared_bytes=shared_bytes,
        overlaps=True,
        cost=cost,
    )


def kernel_name(layout: TileLayout, widening: Widening, tokens: int) -> str:
    """The name expression; its last parameter is the size of shared memory, for the compiler to compare."""
    weight_type, scale_type = WEIGHT_C_TYPES[layout.weight_type], scale_c_type(layout, widening)
    rings = f"{_STAGES[tokens]}, {_shared_bytes(tokens)}"
    return f"gemm_wide<{weight_type}, {scale_type}, {WIDENINGS.index(widening)}, {tokens}, {rings}>"


def narrow_name(layout: TileLayout, widening: Widening, form: NarrowForm) -> str:
    """The name expression for blocks of a form."""
    types = f"{WEIGHT_C_TYPES[layout.weight_type]}, {scale_c_type(layout, widening)}"
    block = form.tokens, form.tiles, form.blocks, *_rings(layout, widening, form)
    return f"gemm_narrow<{types}, {WIDENINGS.index(widening)}, {', '.join(map(str, block))}>"


def narrow_block_size(form: NarrowForm) -> int:
    """Threads of a block: a warp for each tile, and four more, one of which copies tokens."""
    return 32 * (form.tiles + 4)


def narrow_shared_bytes(layout: TileLayout, widening: Widening, form: NarrowForm) -> int:
    """Bytes of dynamic shared memory of a block."""
    return _rings(layout, widening, form)[2]


def _rings(layout: TileLayout, widening: Widening, form: NarrowForm) -> tuple[int, int, int]:
    """Stages of tokens, slots of weights, and the bytes of both."""
    room = _MULTIPROCESSOR_BYTES // form.blocks - _RESERVED_BYTES - NARROW_STATIC_SHARED_BYTES
    stage_bytes, slots_bytes = 2 * SPAN_INPUTS * form.tokens, form.tiles * slot_bytes(layout, widening)
    # Weights need two slots, so that some are being copied, and more if these are small.
    stages = (room - max(2 * slots_bytes, form.tiles * _LEAST_RING_BYTES)) // stage_bytes
    stages = max(_LEAST_STAGES, min(stages, _MAX_STAGES))
    slots = min(_MAX_SLOTS, (room - stages * stage_bytes) // slots_bytes)
    return stages, slots, stages * stage_bytes + slots * slots_bytes


@dataclass(frozen=True, kw_only=True)
class WideCost(KernelCost):
    """The cost of one call, and what decides how long the tensor cores take."""

    layout: TileLayout
    num_tokens: int
    num_parts: int


def gemm_wide_cost(layout: TileLayout, num_tokens: int, epilogue: Epilogue, num_parts: int = 1) -> WideCost:
    """What one call moves: the matrix and the image once (re-reads are L2's), the results."""
    out_bytes = 4 * num_tokens * layout.num_rows * num_parts
    if epilogue == "swiglu":
        out_bytes = image_bytes(layout.num_rows // 2, num_tokens)
    return WideCost(
        read_bytes=layout.num_bytes
        + image_bytes(layout.num_inputs, num_tokens)
        + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes,
        flops=2 * num_tokens * layout.num_rows * layout.num_inputs,
        stored_bytes=layout.num_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
        layout=layout,
        num_tokens=num_tokens,
        num_parts=num_parts,
    )


def _shared_bytes(tokens: int) -> int:
    return (_STAGES[tokens] + 1) * tokens * STEP_INPUTS * 2


SPEC = KernelSpec(
    "gemm_wide",
    "many tokens in fp16 times a tiled matrix of 4 to 16 bits, with bias, residual sum or SwiGLU, on sm_90",
    tuple(dict.fromkeys(kernel_name(layout, way, tokens) for layout, way in all_forms() for tokens in WIDE_TOKENS)),
    only_arch="sm_90",
)

NARROW_SPEC = KernelSpec(
    "gemm_narrow",
    "up to 64 tokens in fp16 times a tiled matrix of 4 to 16 bits, with bias, residual sum or SwiGLU, on sm_90",
    tuple(dict.fromkeys(narrow_name(layout, way, form) for layout, way in all_forms() for form in NARROW_FORMS)),
    only_arch="sm_90",
)
