"""Quantizes rows of weights: first scales, rounded to their stored dtype, then the integers for them.

A scale is the smallest value of its dtype that keeps every weight of its group within half a step of the range, so
clipping never costs more than rounding. For int8 the range itself reaches the largest weight: half a step more would
gain 0.4 %. For int4 half a step is a fifteenth of the range, and using it makes errors 2 to 6 % smaller (measured on
normal, Student and Laplace weights, in groups of 32 to 4096).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.quantization.schemes import WeightScheme, packed_size

# The bit layout of compressed-tensors `pack-quantized`: codes in int32, the first code in the lowest bits.
#
# Converts AWQ and GPTQ layouts to it, code for code. Source: compressed_tensors.compressors.pack_quantized.helpers;
# awq.utils.packing_utils; gptqmodel's qlinear. The tests compare with all three.

# The float types of weights, by their safetensors names, in numpy's form: BF16, which numpy lacks, as bits.
#
# Widening is exact. Scales are rounded up to their type, so that a range computed from them is never too narrow.

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


_WORD = np.dtype("<i4")

# The shift in an AWQ word of each of eight neighbouring columns; from low to high they are 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)

# A block stays in a core's cache: inputs of AWQ, and words along the inputs, which fill a cache line.
_BLOCK_INPUTS = 256
_BLOCK_WORDS = 16


def pack_rows(codes: Array, num_bits: int) -> Array:
    """Pack codes along each row; a row's last int32 is padded with zero bits.

    Shapes: codes [rows, size] uint8; the result [rows, packed_size(size, num_bits)] int32, little-endian.
    """
    num_rows, size = codes.shape
    codes_per_word = 32 // num_bits
    width = packed_size(size, num_bits) * codes_per_word
    if width != size:
        codes = np.pad(codes, ((0, 0), (0, width - size)))
    codes = np.ascontiguousarray(codes)
    if num_bits == 4:
        pairs = codes.view("<u2")  # the first code of two in the lower byte
        codes = (pairs | (pairs >> 4)).astype(np.uint8)  # keeps that byte: both codes side by side
    return codes.view(_WORD)


def unpack_rows(packed: Array, num_bits: int, size: int) -> Array:
    """The codes of `pack_rows`. Shapes: packed [rows, words] int32; the result [rows, size] uint8."""
    codes = np.ascontiguousarray(packed, dtype=_WORD).view(np.uint8)
    if num_bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
    return codes[:, :size]


def pack_zero_points(zero_points: Array, num_bits: int) -> Array:
    """Pack zero points along the rows of the weight, as the format does.

    Shapes: zero_points [rows, groups] uint8; the result [packed_size(rows, num_bits), groups] int32.
    """
    return np.ascontiguousarray(pack_rows(zero_points.T, num_bits).T)


def unpack_zero_points(packed: Array, num_bits: int, num_rows: int) -> Array:
    """The zero points of `pack_zero_points`. Shapes: packed [words, groups] int32; the result [num_rows, groups]."""
    return unpack_rows(packed.T, num_bits, num_rows).T


def unpack_awq_columns(packed: Array) -> Array:
    """Codes of 4 bits that AWQ (gemm) packs along the columns, as rows.

    Shapes: packed [num_rows, columns / 8] int32; the result [columns, num_rows] uint8
    """
    words = np.ascontiguousarray(np.asarray(packed, dtype=_WORD).T).view(np.uint32)  # [columns / 8, num_rows]
    codes = np.empty((len(words), len(_AWQ_SHIFTS), words.shape[1]), np.uint8)
    for column, shift in enumerate(_AWQ_SHIFTS):
        codes[:, column] = (words >> np.uint32(shift)) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])


def rows_of_awq(packed: Array) -> Array:
    """AWQ's (gemm) words, packed along the outputs of a weight [input_size, output_size], in our order.

    Eight words of eight inputs are a square of codes, which is transposed in three steps: swap halves of words, then
    halves of halves, then single codes. Code by code it takes ten times as long.
    Shapes: packed [input_size, output_size / 8] int32; the result [output_size, ceil(input_size / 8)] int32
    """
    num_rows, words = packed.shape
    rows = np.empty((words, 8, -(-num_rows // 8)), np.uint32)
    for begin in range(0, num_rows, _BLOCK_INPUTS):
        block = np.asarray(packed[begin : begin + _BLOCK_INPUTS], dtype=_WORD)
        padded = np.pad(block, ((0, -len(block) % 8), (0, 0)))
        squares = padded.view(np.uint32).reshape(-1, 8, words)  # [input words, inputs, output words]
        _turn(squares)
        # Word p of a square has eight inputs of the column that AWQ keeps at place p.
        first = begin // 8
        for column, shift in enumerate(_AWQ_SHIFTS):
            rows[:, column, first : first + len(squares)] = squares[:, shift // 4].T
    return rows.reshape(-1, rows.shape[2]).view(_WORD)


def _turn(squares: Array) -> None:
    """Transpose squares of 8 x 8 codes of 4 bits in place. Shapes: squares uint32 [.., 8, ..], eight codes a word"""
    changed = np.empty_like(squares[:, 0])
    for shift, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        distance = shift // 4
        for first in range(8):
            if first & distance == 0:
                low, high = squares[:, first], squares[:, first + distance]
                np.right_shift(low, np.uint32(shift), out=changed)
                changed ^= high
                changed &= np.uint32(mask)
                high ^= changed
                changed <<= np.uint32(shift)
                low ^= changed


def rows_of_columns(packed: Array) -> Array:
    """GPTQ's words, packed along the inputs of a weight [input_size, output_size]: the same words, in our order.

    Shapes: packed [words, output_size] int32; the result [output_size, words] int32
    """
    rows = np.empty(packed.shape[::-1], _WORD)
    for begin in range(0, len(packed), _BLOCK_WORDS):
        rows[:, begin : begin + _BLOCK_WORDS] = packed[begin : begin + _BLOCK_WORDS].T
    return rows


def reorder_rows(packed: Array, num_bits: int, order: Array) -> Array:
    """Rows of `pack_rows` reordered: code i is the old code order[i].

    Shapes: packed [rows, words] int32; order [size] int; the result as packed
    """
    # One column of codes at a time: numpy picks single bytes out of a row ten times as slowly.
    columns = rows_of_columns(packed).view(np.uint32)  # [words, rows]
    codes_per_word, mask = 32 // num_bits, np.uint32((1 << num_bits) - 1)
    reordered = np.zeros_like(columns)
    for place, source in enumerate(order.tolist()):
        code = columns[source // codes_per_word] >> np.uint32(num_bits * (source % codes_per_word))
        reordered[place // codes_per_word] |= (code & mask) << np.uint32(num_bits * (place % codes_per_word))
    return rows_of_columns(reordered.view(_WORD))


INT8_STEPS = 127.0
INT4_STEPS_ABOVE, INT4_STEPS_BELOW = 7.5, 8.5  # the range -8..7 and half a step on either side
LONG_GROUP = 256


@dataclass(frozen=True)
class RowErrors:
    """The error of some rows' integers against their weights.

    Shapes: error_squares and weight_squares [rows] float64, the sums of (w - dequantized w)^2 and of w^2; their last
    bits depend on the device's order of summing.
    `num_saturated` of the `num_weights` codes are the lowest or the highest possible.
    """

    error_squares: Array
    weight_squares: Array
    num_saturated: int
    num_weights: int


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of one weight as integers.

    Shapes: codes [rows, input_size] uint8; scales [rows, groups] float32, representable in their stored dtype;
    zero_points [rows, groups] uint8, None if symmetric.
    """

    codes: Array
    scales: Array
    zero_points: Array | None
    errors: RowErrors


def quantize_rows(stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str) -> QuantizedRows | None:
    """Quantize rows of weights; None if a weight is NaN or infinite, or too large for `scale_dtype`.

    Shapes: stored [rows, input_size] as STORED_AS[dtype]; the scheme's group size must divide input_size.
    Guarantees: |w - (code - zero_point) * scale| <= scale/2, up to the rounding of w / scale.
    """
    num_rows, input_size = stored.shape
    groups = widen(stored, dtype).reshape(num_rows, scheme.num_groups(input_size), -1)  # [rows, groups, group_size]
    lowest, highest = _extremes(groups)
    if np.isnan(lowest).any():  # if rounded up, the bits of some NaN become a number
        return None
    scales = _scales(lowest.astype(np.float64), highest.astype(np.float64), scheme, scale_dtype)
    if not np.isfinite(scales).all():  # a weight is infinite, or too large
        return None

    # With 16-bit weights and scales no quotient is too close to a tie for float32; with float32 weights some are.
    precision = np.float64 if dtype == "F32" else np.float32
    in_place = None if dtype == "F32" else groups
    steps = np.divide(groups, scales[..., None], out=in_place, dtype=precision)  # weights in units of their scale
    nearest = np.rint(steps)  # half to even
    low, high = scheme.code_range
    if scheme.is_symmetric:
        zero_points = None
        np.clip(nearest, low - scheme.offset, high - scheme.offset, out=nearest)
        codes = nearest.astype(np.int8).view(np.uint8)
        codes += np.uint8(scheme.offset)  # modulo 256, so that -1 and 128 give 127
    else:
        zeros = np.rint(np.clip(-lowest.astype(np.float64) / scales, low, high))
        zero_points = zeros.astype(np.uint8)
        zeros = zeros.astype(precision)[..., None]
        np.clip(nearest, low - zeros, high - zeros, out=nearest)
        codes = (nearest + zeros).astype(np.uint8)

    scale_squares = scales.astype(np.float64) ** 2
    weight_squares = _sums_of_squares(steps)
    steps -= nearest
    error_squares = _sums_of_squares(steps)
    return QuantizedRows(
        codes=codes.reshape(num_rows, input_size),
        scales=scales,
        zero_points=zero_points,
        errors=RowErrors(
            error_squares=(error_squares * scale_squares).sum(axis=-1),
            weight_squares=(weight_squares * scale_squares).sum(axis=-1),
            num_saturated=int(np.count_nonzero((codes == low) | (codes == high))),
            num_weights=codes.size,
        ),
    )


def steps_of_range(scheme: WeightScheme) -> tuple[float, float]:
    """How many scales the highest weight of a group may be above zero, and the lowest below it.

    In an asymmetric scheme both are the group's width.
    """
    if not scheme.is_symmetric:
        return float(scheme.code_range[1]), float(scheme.code_range[1])
    return (INT8_STEPS, INT8_STEPS) if scheme.num_bits == 8 else (INT4_STEPS_ABOVE, INT4_STEPS_BELOW)


def _sums_of_squares(values: Array) -> Array:
    """For each group. In float64 a square of float32 is exact: the order of summing does not show in 12 digits.

    Shapes: values [rows, groups, group_size] float32 or float64; the result [rows, groups] float64.
    """
    wide = values.astype(np.float64, copy=False)
    sums: Array = np.einsum("rgi,rgi->rg", wide, wide)
    return sums


def _extremes(groups: Array) -> tuple[Array, Array]:
    """The lowest and the highest weight of each group; NaN if the group has one.

    Shapes: groups [rows, groups, group_size]; both results [rows, groups].
    """
    if groups.shape[-1] >= LONG_GROUP:
        return groups.min(axis=-1), groups.max(axis=-1)
    # Short rows cost numpy a call each: in groups of 32, 3.7 ns a weight against 0.8 with this copy (AMD EPYC).
    by_position = np.ascontiguousarray(np.moveaxis(groups, -1, 0))  # [group_size, rows, groups]
    return by_position.min(axis=0), by_position.max(axis=0)


def _scales(lowest: Array, highest: Array, scheme: WeightScheme, scale_dtype: str) -> Array:
    """The scale of each group from its lowest and highest weight, float64; 1 for a group of zeros."""
    above, below = steps_of_range(scheme)
    if scheme.is_symmetric:
        exact = np.maximum(highest / above, -lowest / below)
    else:
        exact = (np.maximum(highest, 0) - np.minimum(lowest, 0)) / above
    # Some devices flush subnormal scales to zero, and their few bits make the step far too coarse.
    scales = np.maximum(round_up(exact, scale_dtype), np.float32(SMALLEST_NORMAL[scale_dtype]))
    return np.where(exact == 0, np.float32(1), scales)


# The error of quantizing one tensor, from its rows' sums.
#
# The last bits of those sums differ between devices. Figures are rounded far more coarsely, so that files are equal.

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
    # A row of zeros has no error; dividing by 1 instead of 0 gives that.
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
    """Numbers rounded to the significant bits that all devices agree on. Shapes: any float64; as given."""
    mantissas, exponents = np.frexp(values)
    rounded: Array = np.ldexp(np.rint(np.ldexp(mantissas, _SIGNIFICANT_BITS)), exponents - _SIGNIFICANT_BITS)
    return rounded
