"""Activations as pairs of 16-bit numbers, times a norm's weights: the input of gemm_halves."""

from typing import Any

from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.staged_rows import stage_cost, stage_rows
from llmcli.kernels.tiles import WEIGHT_C_TYPES, TileLayout

TOKENS = (16, 32, 64, 128)  # rows of one image; at most 64 for 8-bit floats, which are widened in registers
_INPUT_BYTES = 4  # of an image


def tokens_of(layout: TileLayout, num_rows: int) -> int:
    """Rows of one image where there are `num_rows` in all."""
    most = 64 if layout.weight_type == "fp8" else TOKENS[-1]
    return min(next((tokens for tokens in TOKENS if num_rows <= tokens), most), most)


def unit_bytes(layout: TileLayout, tokens: int) -> int:
    """UNIT_BYTES of common/half_image.cuh."""
    return tokens * (_INPUT_BYTES * layout.unit_inputs + (4 if has_unit_scale(layout) else 0))


def has_unit_scale(layout: TileLayout) -> bool:
    """Whether the pairs of a unit have a scale: those in fp16."""
    return layout.weight_type != "bfloat16"


def image_bytes(layout: TileLayout, num_rows: int) -> int:
    """Bytes of the images of `num_rows` rows."""
    tokens = tokens_of(layout, num_rows)
    return -(-num_rows // tokens) * layout.num_units * unit_bytes(layout, tokens)


def stage_halves(
    device: Launcher,
    *,
    layout: TileLayout,
    x: Any,
    image: Any,
    factors: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
) -> None:
    """Write x, times the norm's weights, as pairs of the weights' type (8 bits: fp16), and each row's norm factor.

    May start before the previous kernel has ended.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; image uint8 [at least image_bytes]; factors
            float32 [num_rows]; norm_weight float32 [num_inputs]
    Raises: ValueError
    """
    num_rows = x.shape[0]
    stage_rows(
        device,
        "stage_halves",
        kernel_name(layout.weight_type, tokens_of(layout, num_rows)),
        layout=layout,
        x=x,
        image=image,
        image_bytes=image_bytes(layout, num_rows),
        factors=factors,
        norm_weight=norm_weight,
        eps=eps,
        input_bytes=_INPUT_BYTES,
    )


def stage_halves_cost(layout: TileLayout, num_rows: int, *, has_norm: bool) -> KernelCost:
    """What one call moves."""
    return stage_cost(layout, num_rows, input_bytes=_INPUT_BYTES, has_norm=has_norm)


def kernel_name(weight_type: str, tokens: int) -> str:
    """The name expression."""
    return f"stage_halves<{WEIGHT_C_TYPES[weight_type]}, {tokens}>"


_VARIANTS = (
    *(kernel_name(weight_type, tokens) for weight_type in ("float16", "bfloat16") for tokens in TOKENS),
    *(kernel_name("fp8", tokens) for tokens in TOKENS[:-1]),
)

SPEC = KernelSpec(
    "stage_halves",
    "rows as pairs of 16-bit numbers, times the norm's weights",
    _VARIANTS,
)
