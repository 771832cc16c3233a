"""The float types of weights, by their safetensors names, in numpy's form: BF16, which numpy lacks, as bits.

Widening is exact. Scales are rounded up to their type, so that a range computed from them is never too narrow.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# How an array of each dtype is stored.
STORED_AS: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
SMALLEST_NORMAL = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}
# The largest float32 that rounds to a finite value of each dtype.
LARGEST_ROUNDED = {
    "BF16": np.array(0x7F7F7FFF, np.uint32).view(np.float32)[()],
    "F16": np.nextafter(np.float32(65520), np.float32(0)),
    "F32": np.finfo(np.float32).max,
}
BF16_SHIFT = 16  # a bf16 is the upper half of a float32


def _e4m3_values() -> Array:
    """The values of bytes as 8-bit floats: 4 bits of exponent, 3 of mantissa, no infinity. Source: arXiv 2209.05433"""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    normal = np.ldexp(8 + mantissas, exponents - 7 - 3)
    values = np.where(exponents == 0, np.ldexp(mantissas, -6 - 3), normal).astype(np.float32)
    values[-1] = np.nan
    return np.concatenate((values, -values))


E4M3_VALUES = _e4m3_values()


def widen(stored: Array, dtype: str) -> Array:
    """Stored floats as float32, exactly. Shapes: any; `stored` as STORED_AS says, the result float32 of that shape."""
    if dtype == "BF16":
        return np.left_shift(stored, BF16_SHIFT, dtype=np.uint32).view(np.float32)
    return stored.astype(np.float32, copy=False)


def narrow(values: Array, dtype: str) -> Array:
    """Float32 values in stored form; exact, as the values must be representable, such as those of `round_up`."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> BF16_SHIFT).astype(np.uint16)
    return values.astype(STORED_AS[dtype])


def round_nearest(values: Array, dtype: str) -> Array:
    """Float32 values in stored form, each rounded to the nearest value of `dtype`, ties to even. NaN may be lost.

    Shapes: values float32, any shape; the result of that shape, as STORED_AS says
    """
    if dtype == "BF16":
        bits = values.view(np.uint32)
        # A carry out of the mantissa runs into the exponent, as it should.
        bits = bits + (((bits >> BF16_SHIFT) & 1) + np.uint32((1 << (BF16_SHIFT - 1)) - 1))
        return (bits >> BF16_SHIFT).astype(np.uint16)
    return values.astype(STORED_AS[dtype], copy=False)


def round_up(values: Array, dtype: str) -> Array:
    """The smallest values of `dtype` that are not below `values`.

    Shapes: values, any shape, float64, positive or 0; the result float32 of that shape, infinite beyond the dtype.
    """
    nearest_type = np.float16 if dtype == "F16" else np.float32
    with np.errstate(over="ignore"):
        nearest = values.astype(nearest_type)
        up = np.where(nearest < values, np.nextafter(nearest, nearest_type(np.inf)), nearest).astype(np.float32)
    if dtype != "BF16":
        return up
    # The bits of a positive float count up with its value, and a carry runs into the exponent, as it should.
    bits = up.view(np.uint32)
    return ((bits + ((1 << BF16_SHIFT) - 1)) >> BF16_SHIFT << BF16_SHIFT).view(np.float32)
