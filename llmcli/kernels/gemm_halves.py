"""y = f(x' @ W.T + bias) for nine and more rows, staged as pairs, and a tiled matrix of floats: gemv's bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from llmcli.kernels.gemv import Epilogue
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.stage_halves import TOKENS, has_unit_scale, image_bytes, tokens_of, unit_bytes
from llmcli.kernels.staged_rows import check_product
from llmcli.kernels.tiles import (
    BLOCK_SCALE,
    SCALE_C_TYPES,
    TILE_ROWS,
    UNIT_BYTES,
    WEIGHT_BITS,
    WEIGHT_C_TYPES,
    TiledMatrix,
    TileLayout,
    tile_layout,
)

BLOCK_SIZE = 384
_MAX_STAGES = 16
STATIC_SHARED_BYTES = 256
# In clocks: the start and end of a block, and of its sums where four add theirs, for each row; then a tile's unit for
# the bytes, or for each row (of fp16 every unit's products become floats), less where four blocks share the inputs.
# A unit of 8-bit floats has as many bytes and twice the inputs, and each span's products become floats.
_BLOCK_CLOCKS, _ROW_SUM_CLOCKS = 5000, 40
_TILE_CLOCKS, _ROW_CLOCKS, _QUARTERS_SHARE = 67, {"float16": 1.49, "bfloat16": 0.91, "fp8": 2.1}, 0.87
_CLUSTERED = 0.92  # of the multiprocessors have room for clusters of four: not every group of them is a multiple


class Form(NamedTuple):
    """What a kernel is compiled for, besides the weights' type and the rows of an image.

    A block multiplies `tiles` tiles with these rows; with `quarters` 4 four blocks share their inputs. `sharers` blocks
    with different tiles fetch the rows together.
    """

    quarters: int
    sharers: int
    tiles: int

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.quarters * self.sharers


@dataclass(frozen=True)
class HalvesPlan:
    """How a product is launched: `num_items` items of work for `num_clusters` clusters, `tokens` rows an image.

    No choice in it changes a bit of the result.
    """

    tokens: int
    form: Form
    num_items: int
    num_clusters: int


def takes(layout: TileLayout) -> bool:
    """Whether the kernel takes such a matrix: floats of 8 and 16 bits."""
    return layout.weight_type in _ROW_CLOCKS


def gemm_halves(
    device: Launcher,
    *,
    matrix: TiledMatrix,
    image: Any,
    factors: Any,
    out: Any,
    bias: Any | None = None,
    epilogue: Epilogue = "store",
) -> None:
    """Multiply the pairs that stage_halves wrote; `out`, `bias`, `epilogue` and all bits as in gemv.

    May start before the previous kernel has ended, and then reads the matrix at once: that kernel must not write it.
    Shapes: image uint8 [at least image_bytes]; factors float32 [num_rows]; out float32 [num_rows, num_outputs];
            bias float32 [16 * num_tiles]
    Raises: ValueError, also for a matrix that it does not take, and on a card without wgmma
    """
    layout = matrix.layout
    num_rows = out.shape[0]
    shape = check_product(
        "gemm_halves",
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
    plan = plan_halves(layout, num_rows, device.num_multiprocessors)
    stages = choose_stages(layout, plan, device.shared_bytes_per_block)
    device.launch(
        "gemm_halves",
        kernel_name(layout, plan, stages),
        grid=(plan.num_clusters * plan.form.cluster,),
        block=BLOCK_SIZE,
        arguments=(matrix.tiles, matrix.scales, image, factors, bias, out, shape),
        shared_bytes=_shared_bytes(layout, plan, stages),
        overlaps=True,
        cost=partial(gemm_halves_cost, layout, num_rows, epilogue=epilogue, has_bias=bias is not None),
    )


@cache
def plan_halves(layout: TileLayout, num_rows: int, num_multiprocessors: int) -> HalvesPlan:
    """The launch of the form that takes the fewest clocks on a card of `num_multiprocessors`.

    Products whose rows fit one image have one form for each size of image, those with more rows another: few kernels
    serve any number of rows.
    """
    tokens = tokens_of(layout, num_rows)
    typical = tokens if num_rows <= tokens else TOKENS[-1]
    plans = (_plan(layout, typical, tokens, form, num_multiprocessors) for form in forms_of(layout, tokens))
    best = min(plans, key=lambda plan: plan_clocks(layout, plan, num_multiprocessors))
    return _plan(layout, num_rows, tokens, best.form, num_multiprocessors)


def _plan(layout: TileLayout, num_rows: int, tokens: int, form: Form, num_multiprocessors: int) -> HalvesPlan:
    num_items = -(-num_rows // tokens) * -(-layout.num_tiles // (form.sharers * form.tiles))
    num_clusters = min(num_items, num_multiprocessors // form.sharers) if form.quarters == 1 else num_items
    return HalvesPlan(tokens, form, num_items, num_clusters)


def forms_of(layout: TileLayout, tokens: int) -> tuple[Form, ...]:
    """The forms that exist for `tokens` rows an image: for many outputs and for few."""
    most_tokens = 32 if layout.weight_type == "fp8" else 64  # with more rows registers hold no more tiles
    return Form(1, 2, 16 if tokens <= most_tokens else 8), Form(4, 1, 8)


def plan_clocks(layout: TileLayout, plan: HalvesPlan, num_multiprocessors: int) -> float:
    """About how long a launch takes on a card of `num_multiprocessors`; fitted to an H200."""
    form, row_clocks = plan.form, _ROW_CLOCKS[layout.weight_type] * plan.tokens
    if form.quarters == 1:
        waves = -(-plan.num_items // (num_multiprocessors // form.cluster))
        return _BLOCK_CLOCKS + waves * layout.num_units * form.tiles * max(_TILE_CLOCKS, row_clocks)
    waves = -(-plan.num_items // max(int(_CLUSTERED * num_multiprocessors / form.cluster), 1))
    unit_clocks = form.tiles * max(_TILE_CLOCKS, _QUARTERS_SHARE * row_clocks)
    return waves * (_BLOCK_CLOCKS + _ROW_SUM_CLOCKS * plan.tokens + layout.num_units / form.quarters * unit_clocks)


def choose_stages(layout: TileLayout, plan: HalvesPlan, shared_bytes_per_block: int) -> int:
    """Units being copied at once."""
    room = shared_bytes_per_block - STATIC_SHARED_BYTES - _shared_bytes(layout, plan, 0)
    return min(room // _stage_bytes(layout, plan), _MAX_STAGES)


def kernel_name(layout: TileLayout, plan: HalvesPlan, stages: int) -> str:
    """The name expression; its last parameter is the size of shared memory, for the compiler to compare."""
    types = WEIGHT_C_TYPES[layout.weight_type], SCALE_C_TYPES[layout.scale_type or "float32"]
    numbers = (layout.group_size or 0, plan.tokens, *plan.form, stages, _shared_bytes(layout, plan, stages))
    return f"gemm_halves<{', '.join((*types, *map(str, numbers)))}>"


@dataclass(frozen=True, kw_only=True)
class HalvesCost(KernelCost):
    """The cost of one call, and what decides how long the tensor cores take."""

    layout: TileLayout
    num_rows: int


def gemm_halves_cost(
    layout: TileLayout, num_rows: int, *, epilogue: Epilogue = "store", has_bias: bool = False
) -> HalvesCost:
    """What one call moves: the matrix and the pairs once (re-reads are L2's), the results."""
    out_bytes = 4 * num_rows * layout.num_rows // (2 if epilogue == "swiglu" else 1)
    stored_bytes = layout.num_bytes + 4 * layout.padded_rows * has_bias
    return HalvesCost(
        read_bytes=stored_bytes + image_bytes(layout, num_rows) + (out_bytes if epilogue == "add" else 0),
        written_bytes=out_bytes,
        flops=2 * num_rows * layout.num_rows * layout.num_inputs,
        stored_bytes=stored_bytes,
        element_bits=WEIGHT_BITS[layout.weight_type],
        layout=layout,
        num_rows=num_rows,
    )


def _shared_bytes(layout: TileLayout, plan: HalvesPlan, stages: int) -> int:
    # A unit scale leaves no registers for the sums of a quarter of the inputs.
    buffers = 2 if has_unit_scale(layout) and plan.form.quarters == 1 else 1
    return stages * _stage_bytes(layout, plan) + buffers * 4 * TILE_ROWS * plan.form.tiles * plan.tokens


def _stage_bytes(layout: TileLayout, plan: HalvesPlan) -> int:
    return -(-unit_bytes(layout, plan.tokens) // 128) * 128 + plan.form.tiles * UNIT_BYTES


def _variants() -> Iterator[str]:
    formats = (
        *((weight_type, None, None) for weight_type in ("float16", "bfloat16")),
        *(("fp8", 128, scale_type) for scale_type in ("float32", BLOCK_SCALE)),
        ("fp8", None, "bfloat16"),
    )
    for weight_type, group_size, scale_type in formats:
        layout = tile_layout(weight_type, TILE_ROWS, 8192, group_size, scale_type)
        for tokens in (one for one in TOKENS if tokens_of(layout, one) == one):
            for form in forms_of(layout, tokens):
                plan = HalvesPlan(tokens, form, num_items=1, num_clusters=1)
                yield kernel_name(layout, plan, choose_stages(layout, plan, 227 * 1024))


SPEC = KernelSpec(
    "gemm_halves",
    "nine and more rows, as pairs of 16-bit numbers, times a tiled matrix of floats of 8 or 16 bits, on sm_90",
    tuple(_variants()),
    only_arch="sm_90",
)
