"""Rows for kernels that work on rows, and what their results share: a power of two a row, inputs left alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from fenced import ROUNDOFF, assert_within, to_float64, to_host

EPSILON = 2.0**-24  # unit roundoff of fp32 arithmetic
STORAGE = [np.float32, np.float16, np.uint16]
# Both sides of every form's limit, widths of real models, and widths whose rows are not 16-byte aligned.
COLUMNS = [1, 7, 8, 40, 64, 172, 256, 1023, 1024, 1028, 4096, 4099, 5120, 8192, 11008, 14336, 16388, 9001]
# Half of float16's smallest subnormal, 2^-24: what rounding to it may lose beside the relative error.
_HALF_SUBNORMAL = {np.dtype(np.float16): 2.0**-25, np.dtype(np.float32): 2.0**-150, np.dtype(np.uint16): 2.0**-134}


def make_rows(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Float32 rows of five kinds in turn: normal, with an outlier of 1e4, zeros, constant, normal times 1e6."""
    generator = np.random.default_rng([seed, num_rows, num_columns])
    x = generator.normal(size=(num_rows, num_columns)).astype(np.float32)
    x[1::5, num_columns // 3] = -1e4
    x[2::5] = 0
    x[3::5] = 3.25
    x[4::5] *= np.float32(1e6)
    return x


def powers_of_two(num_rows: int) -> np.ndarray:
    """Row scales as a matrix product's input leaves them."""
    return np.ldexp(np.float32(1), np.arange(num_rows) % 4 * 3).astype(np.float32)


def assert_rounded(
    out: Any, row_scale: Any, reference: np.ndarray, relative: float | np.ndarray, absolute: float | np.ndarray = 0.0
) -> None:
    """Fail unless out * row_scale is the reference within its rounding and these errors, and the scales as defined."""
    dtype = np.dtype(to_host(out).dtype)
    scale = to_float64(row_scale)
    largest = np.abs(reference).max(axis=1)
    needs_scale = (largest > 2.0**15) & (dtype == np.float16)
    assert np.array_equal(scale == 1, ~needs_scale)
    assert np.all(np.frexp(scale)[0] == 0.5), "not powers of two"
    slack = 1 + 2.0**-18
    scaled = largest[needs_scale] / scale[needs_scale]
    assert np.all((scaled >= 2.0**14 / slack) & (scaled <= 2.0**15 * slack))
    bound = (2 * ROUNDOFF[dtype] + relative) * np.abs(reference) + absolute + _HALF_SUBNORMAL[dtype] * scale[:, None]
    assert_within(to_float64(out) * scale[:, None], reference, bound)


@contextmanager
def unchanged(*arrays: Any) -> Iterator[None]:
    """Fail if the block changes a byte of these arrays."""
    before = [to_host(array) for array in arrays]
    yield
    for number, (array, copy) in enumerate(zip(arrays, before, strict=True)):
        assert np.array_equal(to_host(array).view(np.uint8), copy.view(np.uint8)), f"array {number} was changed"
