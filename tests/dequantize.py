"""The meaning of stored codes, written independently of the code that makes them."""

import numpy as np

from llmcli.quantization.rounding import Array
from llmcli.quantization.schemes import WeightScheme


def dequantize_rows(codes: Array, scales: Array, zero_points: Array | None, scheme: WeightScheme) -> Array:
    """The weights that codes encode, (code - zero_point) * scale in float32.

    Shapes: codes [rows, input_size] uint8; scales [rows, groups] float32; zero_points [rows, groups] uint8, or None
    for a symmetric scheme; the result [rows, input_size] float32. A last partial group is allowed.
    """
    input_size = codes.shape[1]
    group_size = scheme.group_size or input_size
    zeros = np.full(scales.shape, scheme.offset, np.uint8) if zero_points is None else zero_points
    spread = [np.repeat(values, group_size, axis=1)[:, :input_size] for values in (zeros, scales)]
    weights: Array = (codes.astype(np.float32) - spread[0]) * spread[1]
    return weights
