"""Rows for kernels that work on rows: their staged images, the right results, and bounds of errors."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.stage_wide import IMAGE_TOKENS, STEP_INPUTS, image_bytes, num_steps
from llmcli.lab.problem import ROUNDOFF, Expected

# Rows for kernels that work on rows, and the right results of those that round them.

# Both sides of every form's limit, widths of real models, and widths whose rows are not 16-byte aligned.
COLUMNS = (1, 7, 8, 40, 64, 172, 256, 1023, 1024, 1028, 4096, 4099, 5120, 8192, 11008, 14336, 16388, 9001)
# Half of float16's smallest subnormal, 2^-24: what rounding to it may lose besides the relative error.
HALF_SUBNORMAL = {np.dtype(np.float16): 2.0**-25, np.dtype(np.float32): 2.0**-150, np.dtype(np.uint16): 2.0**-134}


def make_rows(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Float32 rows of five kinds in turn: normal, with an outlier of 1e4, zeros, constant, normal times 1e6."""
    generator = np.random.default_rng([seed, num_rows, num_columns])
    x = generator.normal(size=(num_rows, num_columns)).astype(np.float32)
    x[1::5, num_columns // 3] = -1e4
    x[2::5] = 0
    x[3::5] = 3.25
    x[4::5] *= np.float32(1e6)
    return x


def widened(x: np.ndarray, extra: int) -> np.ndarray:
    """Rows with `extra` columns of NaN after each."""
    return np.concatenate([x, np.full((len(x), extra), np.nan, x.dtype)], axis=1)


def powers_of_two(num_rows: int) -> np.ndarray:
    """Row scales as a matrix product's input leaves them."""
    return np.ldexp(np.float32(1), np.arange(num_rows) % 4 * 3).astype(np.float32)


def rounded_rows(
    reference: np.ndarray,
    dtype: Any,
    relative: float | np.ndarray,
    absolute: float | np.ndarray = 0.0,
    *,
    lifts: bool = False,
) -> tuple[Expected, Expected]:
    """The right results of a kernel that computes rows with these errors, and stores them with a scale each.

    A row whose largest element is beyond 2^15 in float16 is divided by the power of two that leaves it in [2^14, 2^15).
    With `lifts` so is one whose largest element is below 2^-8.
    Raises: ValueError for a row so close to a power of two that its scale may be either
    """
    dtype = np.dtype(dtype)
    largest = np.abs(reference).max(axis=1)
    needs_scale = (largest > 2.0**15) & (dtype == np.float16)
    if lifts:
        needs_scale |= (largest > 0) & (largest < 2.0**-8)
    fraction, exponent = np.frexp(largest)  # fraction in [0.5, 1)
    scale = np.where(needs_scale, np.ldexp(1.0, exponent - 15), 1.0)[:, None]
    slack = float(np.max(relative))
    is_near = (
        (np.minimum(fraction - 0.5, 1 - fraction) < slack) & (needs_scale | (largest > 2.0**14)) & (dtype == np.float16)
    )
    if is_near.any():
        raise ValueError("a row's largest element is a power of two within its error: its scale is not certain")
    bound = ((2 * ROUNDOFF[dtype] + relative) * np.abs(reference) + absolute) / scale + HALF_SUBNORMAL[dtype]
    return Expected(reference / scale, bound), Expected(scale[:, 0], 0.0)


# Bounds of errors that several references share.

_SMALLEST_HALF = 2.0**-14  # of the normal numbers of fp16


def sum_bound(reference: np.ndarray, magnitude: np.ndarray, num_terms: int, dtype: Any) -> np.ndarray:
    """How far a correct fp32 sum of `num_terms` products, rounded once to `dtype`, may be from `reference`.

    `magnitude` is the sum of the products' absolute values.
    """
    return np.asarray(2 * ROUNDOFF[np.dtype(dtype)] * np.abs(reference) + np.sqrt(num_terms) * 2.0**-24 * magnitude)


def truncated_sum_bound(x: np.ndarray, weights: np.ndarray, span: int, power: int = 0) -> np.ndarray:
    """How far sums of Hopper's tensor cores may be from x @ weights.T: factors of fp16, one chain of fp32.

    They align 16 products and the sum so far by the largest exponent, cut each at 2^-25 of it, and then their sum at
    2^-23 of itself. So the running sum decides: after an outlier everything is added to a large number. A product's
    exponent is that of its factors; that of a subnormal factor is -14, however small it is.
    Factors of fp16 are the weights over two to the `power`.
    The bound takes one cut at 2^-23 of all that has been added up: signs differ, so cuts cancel. Inputs may come in any
    order within `span` of them. Source: an H200's values; tests/lab/test_lab_bounds.py has a model that gives them
    Shapes: x [num_tokens, num_inputs]; weights [num_outputs, num_inputs]; result [num_tokens, num_outputs]; all float64
    """
    so_far, weights = np.zeros((len(x), len(weights))), np.ldexp(weights, -power)
    sizes = np.zeros_like(so_far)
    for begin in range(0, x.shape[1], span):
        these, those = x[:, begin : begin + span], weights[:, begin : begin + span].T
        sizes += np.abs(so_far) + _lined_up(these) @ _lined_up(those)
        so_far += these @ those
    return np.asarray(np.ldexp(span / 16 * 2.0**-23 * sizes, power))


def _lined_up(factors: np.ndarray) -> np.ndarray:
    """Magnitudes by their exponents in fp16: subnormal ones as the smallest normal one."""
    return np.where(factors == 0, 0.0, np.maximum(np.abs(factors), _SMALLEST_HALF))


def image_of(values: np.ndarray, unit_inputs: int, dtype: DTypeLike = np.float16) -> np.ndarray:
    """The image of these tokens, for a matrix with such units. Elements of tokens that do not exist are zeros.

    Shapes: values [num_tokens, num_inputs]; result in `dtype`, flat
    """
    num_tokens, num_inputs = values.shape
    steps = num_steps(num_inputs)
    blocks = image_bytes(num_inputs, num_tokens) // (2 * IMAGE_TOKENS * STEP_INPUTS * steps)
    padded = np.zeros((blocks * IMAGE_TOKENS, steps * STEP_INPUTS), dtype)
    padded[:num_tokens, :num_inputs] = values
    # A unit has a run of neighbours for each of four lanes. A k-step takes four inputs of each lane: two pairs, which
    # are the same word of two pieces. Four k-steps are a step.
    column = np.arange(steps * STEP_INPUTS)
    unit, lane, place = column // unit_inputs, column % unit_inputs // (unit_inputs // 4), column % (unit_inputs // 4)
    k_step = unit * (unit_inputs // 16) + place // 4
    piece, element = k_step % 4 * 2 + place % 4 // 2, 2 * lane + place % 2
    token = np.arange(blocks * IMAGE_TOKENS)[:, None]
    row = (token // IMAGE_TOKENS * steps + k_step // 4) * IMAGE_TOKENS + token % IMAGE_TOKENS
    image = np.empty(padded.size, dtype)
    image[row * STEP_INPUTS + (piece ^ token % 8) * 8 + element] = padded
    return image
