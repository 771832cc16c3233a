"""Launcher of kernels/quantize_rows.cu: packs rows of float weights as codes with scales and zero points."""

from dataclasses import dataclass

import numpy as np

from llmcli.kernels.arguments import C_TYPES, Array, c_type, check, int32s
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec

BLOCK_SIZE = 256
LONG_GROUP = 1024  # from here on a block finds a group's extremes, below it a warp
_GROUPS_A_BLOCK = 4
_SCALE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
BITS = (8, 4)

SPEC = KernelSpec(
    "quantize_rows",
    "float weights to packed codes, scales and zero points, with their errors",
    tuple(f"group_scales<{c}, {threads}>" for c in C_TYPES.values() for threads in (32, BLOCK_SIZE))
    + tuple(f"quantize_rows<{c}, {bits}, {BLOCK_SIZE}>" for c in C_TYPES.values() for bits in BITS),
)


@dataclass(frozen=True)
class CodeForm:
    """Codes of `num_bits` bits: from `lowest` to the highest that fits, symmetric around `offset` or not.

    A symmetric scale is the larger of a group's highest weight / steps_above and -lowest weight / steps_below. An
    asymmetric one is the group's width / steps_above; each group has a zero point.
    """

    num_bits: int
    lowest: int
    offset: int
    steps_above: float
    steps_below: float


def quantize_rows(
    device: Launcher,
    *,
    weights: Array,
    form: CodeForm,
    scale_type: str,
    scales: Array,
    zero_points: Array | None,
    packed: Array,
    squares: Array,
    num_saturated: Array,
) -> None:
    """Quantize rows; scales that are not finite mark groups that cannot be. With `zero_points` it is asymmetric.

    Shapes: weights [num_rows, num_inputs], any storage type; scales float32 and zero_points uint8 [num_rows, groups],
            where groups divides num_inputs; packed uint32 [num_rows, ceil(num_inputs * bits / 32)]; squares float64
            [num_rows, 2], sums of (w - dequantized w)^2 and of w^2; num_saturated int32 [num_rows]
    Raises: ValueError for arrays that do not fit
    """
    kernel = "quantize_rows"
    check(kernel, "weights", weights, dtype=tuple(C_TYPES), shape=(None, None))
    num_rows, num_inputs = weights.shape
    check(kernel, "scales", scales, dtype=np.float32, shape=(num_rows, None), aligned=4)
    num_groups = scales.shape[1]
    if num_groups == 0 or num_inputs % num_groups:
        raise ValueError(f"{kernel}: {num_groups} groups do not divide {num_inputs} inputs")
    group_size = num_inputs // num_groups
    if form.num_bits not in BITS or scale_type not in _SCALE_TYPES:
        raise ValueError(f"{kernel}: {form.num_bits} bits with scales in {scale_type} are not known")
    if zero_points is not None:
        check(kernel, "zero_points", zero_points, dtype=np.uint8, shape=scales.shape, aligned=1)
    num_words = -(-num_inputs * form.num_bits // 32)
    check(kernel, "packed", packed, dtype=np.uint32, shape=(num_rows, num_words), aligned=4)
    check(kernel, "squares", squares, dtype=np.float64, shape=(num_rows, 2), aligned=8)
    check(kernel, "num_saturated", num_saturated, dtype=np.int32, shape=(num_rows,), aligned=4)

    total = num_rows * num_groups
    is_long = group_size >= LONG_GROUP
    device.launch(
        kernel,
        f"group_scales<{c_type(weights)}, {BLOCK_SIZE if is_long else 32}>",
        grid=(total if is_long else -(-total // _GROUPS_A_BLOCK),),
        block=BLOCK_SIZE if is_long else 32 * _GROUPS_A_BLOCK,
        arguments=(
            *(weights, scales, zero_points, *int32s(total, group_size)),
            *(np.float64(form.steps_above), np.float64(form.steps_below), np.int32(_SCALE_TYPES[scale_type])),
        ),
    )
    device.launch(
        kernel,
        f"quantize_rows<{c_type(weights)}, {form.num_bits}, {BLOCK_SIZE}>",
        grid=(num_rows,),
        block=BLOCK_SIZE,
        arguments=(
            *(weights, scales, zero_points, packed, squares, num_saturated),
            *int32s(num_inputs, group_size, form.lowest, form.offset),
        ),
    )


def quantize_rows_cost(
    *, num_rows: int, num_inputs: int, num_groups: int, num_bits: int, is_symmetric: bool, itemsize: int
) -> KernelCost:
    """Cost of one call; `itemsize` is that of the weights."""
    group_bytes = num_rows * num_groups * (4 if is_symmetric else 5)
    return KernelCost(
        2 * num_rows * num_inputs * itemsize + group_bytes,
        num_rows * (4 * -(-num_inputs * num_bits // 32) + 20) + group_bytes,
        10 * num_rows * num_inputs,
    )
