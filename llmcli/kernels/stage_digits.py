"""Activations as two 8-bit digits, times a norm's weights: the input of gemm_codes."""

from typing import Any

from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec
from llmcli.kernels.staged_rows import stage_cost, stage_rows
from llmcli.kernels.tiles import WEIGHT_C_TYPES, TileLayout

TOKENS = (16, 32, 64)  # rows of one image
_INPUT_BYTES = 2  # of an image


def tokens_of(layout: TileLayout, num_rows: int) -> int:
    """Rows of one image where there are `num_rows` in all."""
    # With zero points the product has too few registers for 64.
    possible = TOKENS if layout.is_symmetric else TOKENS[:-1]
    return next((tokens for tokens in possible if num_rows <= tokens), possible[-1])


def span_bytes(layout: TileLayout, tokens: int) -> int:
    """SPAN_BYTES of common/digit_image.cuh."""
    return tokens * (2 * layout.span_inputs + (4 if layout.is_symmetric else 8))


def image_bytes(layout: TileLayout, num_rows: int) -> int:
    """Bytes of the images of `num_rows` rows."""
    tokens = tokens_of(layout, num_rows)
    return -(-num_rows // tokens) * layout.num_spans * span_bytes(layout, tokens)


def stage_digits(
    device: Launcher,
    *,
    layout: TileLayout,
    x: Any,
    image: Any,
    factors: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
) -> None:
    """Write the digits of x times the norm's weights, for a matrix of `layout`, and each row's norm factor.

    May start before the previous kernel has ended.
    Shapes: x float32 [num_rows, num_inputs], rows any distance apart; image uint8 [at least image_bytes]; factors
            float32 [num_rows]; norm_weight float32 [num_inputs]
    Raises: ValueError
    """
    num_rows = x.shape[0]
    stage_rows(
        device,
        "stage_digits",
        kernel_name(layout, tokens_of(layout, num_rows)),
        layout=layout,
        x=x,
        image=image,
        image_bytes=image_bytes(layout, num_rows),
        factors=factors,
        norm_weight=norm_weight,
        eps=eps,
        input_bytes=_INPUT_BYTES,
    )


def stage_digits_cost(layout: TileLayout, num_rows: int, *, has_norm: bool) -> KernelCost:
    """What one call moves."""
    return stage_cost(layout, num_rows, input_bytes=_INPUT_BYTES, has_norm=has_norm)


def kernel_name(layout: TileLayout, tokens: int) -> str:
    """The name expression."""
    is_symmetric = "true" if layout.is_symmetric else "false"
    return f"stage_digits<{WEIGHT_C_TYPES[layout.weight_type]}, {is_symmetric}, {tokens}>"


SPEC = KernelSpec(
    "stage_digits",
    "rows as two 8-bit digits, times the norm's weights",
    tuple(
        f"stage_digits<{weight_type}, {is_symmetric}, {tokens}>"
        for weight_type in ("Int8", "Int4")
        for is_symmetric in ("true", "false")
        for tokens in TOKENS
    ),
)
