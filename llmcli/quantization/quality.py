"""What quantizing one tensor cost, from the sums its rows leave behind.

Those sums differ in their last bits between devices. Figures are rounded far coarser, so that files do not differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcli.quantization.floats import Array
from llmcli.quantization.rounding import RowErrors

_SIGNIFICANT_BITS = 20


@dataclass(frozen=True)
class TensorQuality:
    """Errors of one quantized weight.

    Units: errors are root mean squares of w - dequantized w relative to those of w; `worst_row` is the row (output
    channel) with the largest one; `saturation` is the share of weights at either end of the range of codes.
    """

    relative_rms_error: float
    worst_row: int
    worst_row_error: float
    saturation: float


def measure_quality(blocks: Sequence[RowErrors]) -> TensorQuality:
    """The quality of a weight from the errors of all blocks of its rows, in order."""
    error_squares = np.concatenate([block.error_squares for block in blocks])
    weight_squares = np.concatenate([block.weight_squares for block in blocks])
    # A row of zeros has no error; dividing by 1 instead of 0 says so.
    row_errors = _rounded(np.sqrt(error_squares / np.where(weight_squares > 0, weight_squares, 1)))
    worst_row = int(row_errors.argmax())
    total = weight_squares.sum()
    return TensorQuality(
        relative_rms_error=float(_rounded(np.sqrt(error_squares.sum() / total))) if total > 0 else 0.0,
        worst_row=worst_row,
        worst_row_error=float(row_errors[worst_row]),
        saturation=sum(block.num_saturated for block in blocks) / sum(block.num_weights for block in blocks),
    )


def _rounded(values: Array) -> Array:
    """Numbers with no more than the significant bits that every device agrees on. Shapes: any float64; as given."""
    mantissas, exponents = np.frexp(values)
    rounded: Array = np.ldexp(np.rint(np.ldexp(mantissas, _SIGNIFICANT_BITS)), exponents - _SIGNIFICANT_BITS)
    return rounded
