"""Rows for kernels that work on rows, and what must come out of those that round them."""

from typing import Any

import numpy as np

from llmcli.lab.problem import ROUNDOFF, Expected

# Both sides of every form's limit, widths of real models, and widths whose rows are not 16-byte aligned.
COLUMNS = (1, 7, 8, 40, 64, 172, 256, 1023, 1024, 1028, 4096, 4099, 5120, 8192, 11008, 14336, 16388, 9001)
# Half of float16's smallest subnormal, 2^-24: what rounding to it may lose beside the relative error.
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
    """Rows with so many columns of NaN behind each."""
    return np.concatenate([x, np.full((len(x), extra), np.nan, x.dtype)], axis=1)


def powers_of_two(num_rows: int) -> np.ndarray:
    """Row scales as a matrix product's input leaves them."""
    return np.ldexp(np.float32(1), np.arange(num_rows) % 4 * 3).astype(np.float32)


def rounded_rows(
    reference: np.ndarray, dtype: Any, relative: float | np.ndarray, absolute: float | np.ndarray = 0.0
) -> tuple[Expected, Expected]:
    """What must come out of a kernel that computes rows with these errors, and stores them with a scale each.

    A row whose largest element is beyond 2^15 in float16 is divided by the power of two that leaves it in [2^14, 2^15).
    Raises: ValueError for a row so near to a power of two that its scale may be either
    """
    dtype = np.dtype(dtype)
    largest = np.abs(reference).max(axis=1)
    needs_scale = (largest > 2.0**15) & (dtype == np.float16)
    fraction, exponent = np.frexp(largest)  # fraction in [0.5, 1)
    scale = np.where(needs_scale, np.ldexp(1.0, exponent - 15), 1.0)[:, None]
    slack = float(np.max(relative))
    is_near = (np.minimum(fraction - 0.5, 1 - fraction) < slack) & (largest > 2.0**14) & (dtype == np.float16)
    if is_near.any():
        raise ValueError("a row's largest element is a power of two within its error: its scale is not certain")
    bound = ((2 * ROUNDOFF[dtype] + relative) * np.abs(reference) + absolute) / scale + HALF_SUBNORMAL[dtype]
    return Expected(reference / scale, bound), Expected(scale[:, 0], 0.0)
