"""Rounds activations of many tokens to fp16, times a norm's weights or not, in the order of gemm_wide's products."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.rows import VECTOR
from llmcli.kernels.spec import KernelCost, KernelSpec

BLOCK_SIZE = 512
STEP_INPUTS = 64  # of a step of gemm_wide; two make a span
IMAGE_TOKENS = 128  # of a block of an image
WIDE_TOKENS = (128, 256)  # that a block of gemm_wide may multiply
UNIT_INPUTS = (64, 128, 32)  # of the matrices that it takes

SPEC = KernelSpec(
    "stage_wide",
    "rows in fp16 as gemm_wide takes them, times the norm's weights or not, with a power of two each",
    tuple(f"stage_wide<{unit}, {vector}>" for unit in UNIT_INPUTS for vector in (VECTOR, 1)),
)


@dataclass(frozen=True)
class ImageRows:
    """Rows of an image, from its token `first_token` on, for a matrix whose units have `unit_inputs` inputs.

    Shapes: image uint8, flat, with all tokens of its last block
    """

    image: Any
    first_token: int
    unit_inputs: int


def num_steps(num_inputs: int) -> int:
    """Steps of the whole spans that hold `num_inputs` inputs."""
    return 2 * -(-num_inputs // (2 * STEP_INPUTS))


def image_bytes(num_inputs: int, num_tokens: int) -> int:
    """Bytes of the image of `num_tokens` tokens: of gemm_wide's smallest block, or of whole large blocks."""
    tokens = IMAGE_TOKENS if num_tokens <= IMAGE_TOKENS else WIDE_TOKENS[-1]
    return -(-num_tokens // tokens) * tokens * num_steps(num_inputs) * STEP_INPUTS * 2


def check_image(kernel: str, name: str, image: Any, num_inputs: int, num_tokens: int) -> None:
    """Refuse an image that is too small.

    Raises: ValueError
    """
    check(kernel, name, image, dtype=np.uint8, shape=(None,))
    needed = image_bytes(num_inputs, num_tokens)
    if image.nbytes < needed:
        raise ValueError(f"{kernel}: {name} has {image.nbytes} bytes, expected {needed}")


def stage_wide(
    device: Launcher,
    *,
    x: Any,
    unit_inputs: int,
    image: Any,
    row_scales: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    largest: Any | None = None,
    parts: Any | None = None,
) -> None:
    """Write x, normed or not, over the power of two of each row; and that power. Set `largest` to zeros.

    `unit_inputs` is that of the matrix that will be multiplied with the image. First `parts` are added to x, in order.
    Shapes: x float32 [num_tokens, num_inputs]; image uint8 [at least image_bytes]; row_scales float32 [num_tokens];
            norm_weight float32 [num_inputs]; largest uint32 [num_tokens]; parts float32 [num_parts, num_tokens,
            num_inputs]
    Raises: ValueError for arrays that do not fit
    """
    check("stage_wide", "x", x, dtype=np.float32, shape=(None, None))
    num_tokens, num_inputs = x.shape
    check("stage_wide", "row_scales", row_scales, dtype=np.float32, shape=(num_tokens,), aligned=4)
    check_image("stage_wide", "image", image, num_inputs, num_tokens)
    if norm_weight is not None:
        check("stage_wide", "norm_weight", norm_weight, dtype=np.float32, shape=(num_inputs,))
    if largest is not None:
        check("stage_wide", "largest", largest, dtype=np.uint32, shape=(num_tokens,), aligned=4)
    num_parts, vector = 0, VECTOR if num_inputs % VECTOR == 0 else 1
    if parts is not None:
        check("stage_wide", "parts", parts, dtype=np.float32, shape=(None, num_tokens, num_inputs))
        num_parts = len(parts)
    sizes = np.int32(num_parts), np.int32(num_inputs), np.float32(eps)
    device.launch(
        "stage_wide",
        f"stage_wide<{unit_inputs}, {vector}>",
        grid=(num_tokens,),
        block=BLOCK_SIZE,
        arguments=(x, parts, norm_weight, image, row_scales, largest, *sizes),
        overlaps=True,
        cost=lambda: stage_wide_cost(
            num_tokens=num_tokens, num_inputs=num_inputs, has_norm=norm_weight is not None, num_parts=num_parts
        ),
    )


def stage_wide_cost(*, num_tokens: int, num_inputs: int, has_norm: bool, num_parts: int = 0) -> KernelCost:
    """What one call moves and computes."""
    count, weight_bytes = num_tokens * num_inputs, 4 * num_inputs * has_norm
    padded = num_tokens * num_steps(num_inputs) * STEP_INPUTS
    read, written = 4 * count * (1 + num_parts), 4 * count * (num_parts > 0)
    return KernelCost(read + weight_bytes, written + 2 * padded + 4 * num_tokens, (4 + num_parts) * count, weight_bytes)
