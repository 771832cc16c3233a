"""Rounds activations of many tokens to fp16, times a norm's weights or not, in the order of gemm_wide's products."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.arguments import C_TYPES, check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec

BLOCK_SIZE = 512
STEP_INPUTS = 64  # of a step of gemm_wide; two make a span
IMAGE_TOKENS = 128  # of a block of an image
WIDE_TOKENS = (128, 256)  # that a block of gemm_wide may multiply
UNIT_INPUTS = (64, 128, 32)  # of the matrices that it takes
_MOST_INPUTS = 65536  # whose sums fit the shared memory of a block


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


def padded_inputs(num_inputs: int) -> int:
    """The inputs of whole spans."""
    return num_steps(num_inputs) * STEP_INPUTS


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


def check_image_rows(kernel: str, rows: ImageRows, num_inputs: int, num_tokens: int) -> None:
    """Refuse a place for `num_tokens` rows without padding that is no image of such rows.

    Raises: ValueError
    """
    if rows.unit_inputs not in UNIT_INPUTS:
        raise ValueError(f"{kernel}: units have {rows.unit_inputs} inputs, expected one of {UNIT_INPUTS}")
    if rows.first_token < 0:
        raise ValueError(f"{kernel}: the first token of the image is {rows.first_token}, expected 0 or more")
    if num_inputs % (2 * STEP_INPUTS):
        raise ValueError(f"{kernel}: rows of {num_inputs} inputs, expected a multiple of {2 * STEP_INPUTS}")
    check_image(kernel, "out", rows.image, num_inputs, rows.first_token + num_tokens)


def stage_wide(
    device: Launcher,
    *,
    x: Any,
    unit_inputs: int,
    out: Any,
    row_scales: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    parts: Any | None = None,
) -> None:
    """Write x, normed or not, over the power of two of each row; and that power.

    `unit_inputs` is that of the matrix that gemm_wide multiplies with the image; 0 for rows of gemv. First `parts` are
    added to x, in order.
    Shapes: x [num_tokens, num_inputs] float32, or without parts float16; out uint8 [at least image_bytes], or for gemv
            float16 [num_tokens, padded_inputs]; row_scales float32 [num_tokens]; norm_weight float32 [num_inputs];
            parts float32 [num_parts, num_tokens, num_inputs]
    Raises: ValueError for arrays that do not fit
    """
    check("stage_wide", "x", x, dtype=(np.float32, np.float16), shape=(None, None))
    num_tokens, num_inputs = x.shape
    check("stage_wide", "row_scales", row_scales, dtype=np.float32, shape=(num_tokens,), aligned=4)
    if unit_inputs:
        check_image("stage_wide", "out", out, num_inputs, num_tokens)
    else:
        check("stage_wide", "out", out, dtype=np.float16, shape=(num_tokens, padded_inputs(num_inputs)))
    if norm_weight is not None:
        check("stage_wide", "norm_weight", norm_weight, dtype=np.float32, shape=(num_inputs,))
    if num_inputs > _MOST_INPUTS:
        raise ValueError(f"stage_wide: rows of {num_inputs} inputs, expected at most {_MOST_INPUTS}")
    num_parts = 0
    if parts is not None:
        check("stage_wide", "x", x, dtype=np.float32, shape=x.shape)
        check("stage_wide", "parts", parts, dtype=np.float32, shape=(None, num_tokens, num_inputs))
        num_parts = len(parts)
    sizes = np.int32(num_parts), np.int32(num_inputs), np.float32(1.0 / num_inputs), np.float32(eps)
    device.launch(
        "stage_wide",
        _name(unit_inputs, x.dtype, num_inputs % 8 == 0),
        grid=(num_tokens,),
        block=BLOCK_SIZE,
        arguments=(x, parts, norm_weight, out, row_scales, *sizes),
        shared_bytes=padded_inputs(num_inputs) // 2,
        overlaps=True,
        cost=lambda: stage_wide_cost(
            num_tokens=num_tokens,
            num_inputs=num_inputs,
            itemsize=x.dtype.itemsize,
            has_norm=norm_weight is not None,
            num_parts=num_parts,
        ),
    )


def _name(unit_inputs: int, dtype: np.dtype[Any], is_even: bool) -> str:
    return f"stage_wide<{unit_inputs}, {C_TYPES[dtype]}, {str(is_even).lower()}>"


def stage_wide_cost(
    *, num_tokens: int, num_inputs: int, has_norm: bool, num_parts: int = 0, itemsize: int = 4
) -> KernelCost:
    """What one call moves and computes."""
    count, weight_bytes = num_tokens * num_inputs, 4 * num_inputs * has_norm
    padded = num_tokens * num_steps(num_inputs) * STEP_INPUTS
    read, written = count * (itemsize + 4 * num_parts), 4 * count * (num_parts > 0)
    return KernelCost(read + weight_bytes, written + 2 * padded + 4 * num_tokens, (4 + num_parts) * count, weight_bytes)


SPEC = KernelSpec(
    "stage_wide",
    "rows in fp16 as gemm_wide and gemv take them, times the norm's weights or not, with a power of two each",
    tuple(
        _name(unit, np.dtype(dtype), is_even)
        for unit in (0, *UNIT_INPUTS)
        for dtype in (np.float32, np.float16)
        for is_even in (True, False)
    ),
)
