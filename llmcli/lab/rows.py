"""Rows for kernels that work on rows: their staged images, the right results, and bounds of errors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.stage_digits import tokens_of
from llmcli.kernels.stage_halves import has_unit_scale
from llmcli.kernels.stage_halves import tokens_of as tokens_of_halves
from llmcli.kernels.stage_wide import IMAGE_TOKENS, STEP_INPUTS, image_bytes, num_steps
from llmcli.kernels.tiles import TileLayout
from llmcli.lab.matrices import DTYPES, to_storage
from llmcli.lab.problem import ROUNDOFF, Expected, stored_values

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
    reference: np.ndarray, dtype: Any, relative: float | np.ndarray, absolute: float | np.ndarray = 0.0
) -> tuple[Expected, Expected]:
    """The right results of a kernel that computes rows with these errors, and stores them with a scale each.

    A row whose largest element is beyond 2^15 in float16 is divided by the power of two that leaves it in [2^14, 2^15).
    Raises: ValueError for a row so close to a power of two that its scale may be either
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


# Bounds of errors that several references share.

_SMALLEST_HALF = 2.0**-14  # of the normal numbers of fp16


def sum_bound(reference: np.ndarray, magnitude: np.ndarray, num_terms: int, dtype: Any) -> np.ndarray:
    """How far a correct fp32 sum of `num_terms` products, rounded once to `dtype`, may be from `reference`.

    `magnitude` is the sum of the products' absolute values.
    """
    return np.asarray(2 * ROUNDOFF[np.dtype(dtype)] * np.abs(reference) + np.sqrt(num_terms) * 2.0**-24 * magnitude)


def truncated_sum_bound(x: np.ndarray, weights: np.ndarray, span: int) -> np.ndarray:
    """How far sums of Hopper's tensor cores may be from x @ weights.T: factors of fp16, one chain of fp32.

    They align 16 products and the sum so far by the largest exponent, cut each at 2^-25 of it, and then their sum at
    2^-23 of itself. So the running sum decides: after an outlier everything is added to a large number. A product's
    exponent is that of its factors; that of a subnormal factor is -14, however small it is.
    The bound takes one cut at 2^-23 of all that has been added up: signs differ, so cuts cancel. Inputs may come in any
    order within `span` of them. Source: an H200's values; tests/lab/test_lab_bounds.py has a model that gives them
    Shapes: x [num_tokens, num_inputs]; weights [num_outputs, num_inputs]; result [num_tokens, num_outputs]; all float64
    """
    so_far = np.zeros((len(x), len(weights)))
    sizes = np.zeros_like(so_far)
    for begin in range(0, x.shape[1], span):
        these, those = x[:, begin : begin + span], weights[:, begin : begin + span].T
        sizes += np.abs(so_far) + _lined_up(these) @ _lined_up(those)
        so_far += these @ those
    return np.asarray(span / 16 * 2.0**-23 * sizes)


def _lined_up(factors: np.ndarray) -> np.ndarray:
    """Magnitudes by their exponents in fp16: subnormal ones as the smallest normal one."""
    return np.where(factors == 0, 0.0, np.maximum(np.abs(factors), _SMALLEST_HALF))


# Activations as two 8-bit digits by NumPy, in the order of kernels/common/digit_image.cuh.

MOST = 32639  # 127 * 256 + 127: the integer of the largest magnitude in a span


@dataclass(frozen=True)
class Digits:
    """Rows as integers. A number is its integer times the scale of its span, in the kernels' float32 arithmetic.

    Shapes: integers int64 [num_rows, num_spans, span_inputs], padded with zeros; scales float32 [num_rows, num_spans]
    """

    layout: TileLayout
    integers: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The values that the integers represent, float64 [num_rows, num_inputs]."""
        values = self.integers * (self.scales.astype(np.float64) / _code_unit(self.layout))[:, :, None]
        return np.asarray(values.reshape(len(values), -1)[:, : self.layout.num_inputs])

    def image(self, unused: int) -> np.ndarray:
        """The bytes as gemm_codes reads them; those of rows that do not exist are `unused`. Shapes: uint8, flat."""
        layout, num_rows = self.layout, len(self.integers)
        tokens = tokens_of(layout, num_rows)
        blocks = -(-num_rows // tokens)
        num_pieces = layout.span_inputs // 16
        high = (self.integers + 128) >> 8
        both = np.stack((high, self.integers - 256 * high), axis=2).astype(np.int8)  # [row, span, digit, input]
        parts = [
            both[..., _input_order(layout)].reshape(num_rows, layout.num_spans, 2 * num_pieces, 16).view(np.uint8),
            self.scales.view(np.uint8).reshape(num_rows, layout.num_spans, 1, 4),
        ]
        if not layout.is_symmetric:
            sums = self.integers.sum(axis=2).astype(np.int32)
            parts.append(sums.view(np.uint8).reshape(num_rows, layout.num_spans, 1, 4))
        laid = []
        for part in parts:
            padded = np.full((blocks * tokens, *part.shape[1:]), unused, np.uint8)
            padded[:num_rows] = part
            # [block, token, span, piece, bytes] -> [block, span, piece, token, bytes]
            split = padded.reshape(blocks, tokens, *part.shape[1:]).transpose(0, 2, 3, 1, 4)
            laid.append(split.reshape(blocks, layout.num_spans, -1))
        return np.ascontiguousarray(np.concatenate(laid, axis=2)).reshape(-1)


def digits_of(layout: TileLayout, values: np.ndarray) -> Digits:
    """The digits of rows, already times the norm's weights. Shapes: values float32 [num_rows, num_inputs]"""
    units = _units(layout, values)
    bounds = _bounds(units)
    integers = np.rint(units.astype(np.float64) * (MOST / bounds.astype(np.float64))[:, :, None]).astype(np.int64)
    return Digits(layout, integers, bounds * np.float32(_code_unit(layout) / MOST))


def far_from_halves(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """Where rounding to an integer is certain, whatever the last bits of the quotient. Shapes: bool as values."""
    units = _units(layout, values)
    quotients = units.astype(np.float64) * (MOST / _bounds(units).astype(np.float64))[:, :, None]
    is_far = np.abs(quotients - np.floor(quotients) - 0.5) > 0.02
    return np.asarray(is_far.reshape(len(values), -1)[:, : layout.num_inputs])


def _units(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """Shapes: result float32 [num_rows, num_spans, span_inputs]"""
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % layout.span_inputs)))
    return np.asarray(padded.reshape(len(values), layout.num_spans, layout.span_inputs))


def _bounds(units: np.ndarray) -> np.ndarray:
    """The largest magnitude of each span, or the number used in place of zero."""
    return np.asarray(np.maximum(np.abs(units).max(axis=2), np.float32(2.0**-100)))


def _code_unit(layout: TileLayout) -> float:
    """Symmetric int4 codes are multiplied as 16 times themselves."""
    return 1 / 16 if layout.weight_type == "int4" and layout.is_symmetric else 1.0


def _input_order(layout: TileLayout) -> np.ndarray:
    """The inputs of a span in the order of [piece][t][4 bytes]."""
    if layout.weight_type == "int8":
        units = [64 * unit + 4 * piece for unit in range(2) for piece in range(4)]
        return np.array([begin + 16 * t + i for begin in units for t in range(4) for i in range(4)])
    # A byte of codes has an even input and the odd one after it; even ones are multiplied first.
    pieces = [(pair, half, eighth) for pair in range(2) for half in range(2) for eighth in range(2)]
    return np.array(
        [
            8 * (4 * t + 2 * pair + eighth) + 2 * i + half
            for pair, half, eighth in pieces
            for t in range(4)
            for i in range(4)
        ]
    )


# Activations as pairs of 16-bit numbers by NumPy, in the order of kernels/common/half_image.cuh.

_TOP = 14  # the largest magnitude of a unit, or of a span for 8-bit floats, is in fp16 in [2^14, 2^15)


@dataclass(frozen=True)
class Halves:
    """Rows as pairs in the weights' type. A number is hi + lo, times the inverse of its unit's scale.

    For 8-bit floats pairs are of fp16, and the units of a span have one scale.
    Shapes: hi, lo uint16 or float16 [num_rows, num_units, unit_inputs], padded with zeros; inverses float32
            [num_rows, num_units], ones for bfloat16
    """

    layout: TileLayout
    hi: np.ndarray
    lo: np.ndarray
    inverses: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The values that the pairs represent, float64 [num_rows, num_inputs]."""
        both = stored_values(self.hi) + stored_values(self.lo)
        values = both * self.inverses.astype(np.float64)[:, :, None]
        return np.asarray(values.reshape(len(values), -1)[:, : self.layout.num_inputs])

    def image(self, unused: int) -> np.ndarray:
        """The bytes as gemm_halves reads them; those of rows that do not exist are `unused`. Shapes: uint8, flat."""
        num_rows, num_units = self.inverses.shape
        tokens, lane_parts = tokens_of_halves(self.layout, num_rows), self.layout.unit_inputs // 32
        blocks = -(-num_rows // tokens)
        # Lane t has eight inputs in each part, two of them in each piece: [row, unit, t, part, piece, 4 bytes] of both.
        lanes = [half.view(np.uint8).reshape(num_rows, num_units, 4, lane_parts, 4, 4) for half in (self.hi, self.lo)]
        pairs = np.full((blocks * tokens, num_units, 2, 4, lane_parts, 4, 4), unused, np.uint8)
        pairs[:num_rows] = np.stack(lanes, axis=2)
        # [block, token, unit, half, t, part, piece, bytes] -> [block, unit, part, piece, token, half, t, bytes]
        laid = pairs.reshape(blocks, tokens, num_units, 2, 4, lane_parts, 4, 4).transpose(0, 2, 5, 6, 1, 3, 4, 7)
        parts = [laid.reshape(blocks, num_units, -1)]
        if has_unit_scale(self.layout):
            scales = np.full((blocks * tokens, num_units, 4), unused, np.uint8)
            scales[:num_rows] = self.inverses[..., None].view(np.uint8)
            parts.append(
                scales.reshape(blocks, tokens, num_units, 4).transpose(0, 2, 1, 3).reshape(blocks, num_units, -1)
            )
        return np.ascontiguousarray(np.concatenate(parts, axis=2)).reshape(-1)


def halves_of(layout: TileLayout, values: np.ndarray) -> Halves:
    """The pairs of rows, already times the norm's weights. Shapes: values float32 [num_rows, num_inputs]"""
    dtype: Any = np.float16 if layout.weight_type == "fp8" else DTYPES[layout.weight_type]
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % layout.span_inputs)))
    units = padded.reshape(len(values), layout.num_units, layout.unit_inputs)
    inverses = np.ones(units.shape[:2], np.float32)
    if has_unit_scale(layout):
        spans = np.abs(padded).reshape(len(values), layout.num_spans, layout.span_inputs).max(axis=2)
        exponents = spans.repeat(layout.num_units // layout.num_spans, axis=1).view(np.uint32) >> 23
        scale_exponents = np.minimum(254 + _TOP - exponents.astype(np.int64), 253)  # biased; both are normal numbers
        inverses = np.ldexp(np.float32(1), 127 - scale_exponents).astype(np.float32)
        units = units * np.ldexp(np.float32(1), scale_exponents - 127).astype(np.float32)[:, :, None]
    hi = to_storage(units, dtype)
    return Halves(layout, hi, to_storage(units - stored_values(hi).astype(np.float32), dtype), inverses)


# Activations in fp16 by NumPy, in the order of kernels/common/wide_image.cuh.


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
