"""Error bounds of quantizing, for every dtype and scheme and for every finite bit pattern."""

import numpy as np
import pytest
from dequantize import dequantize_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmcli.quantization.rounding import (
    LONG_GROUP,
    SMALLEST_NORMAL,
    STORED_AS,
    Array,
    QuantizedRows,
    narrow,
    quantize_rows,
    round_up,
    widen,
)
from llmcli.quantization.schemes import WeightScheme

# Relative rounding of each dtype: half a unit in the last place.
UNIT = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}
EXPONENT_MASK = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}

group_sizes = st.sampled_from([None, 1, 3, 32])
schemes = st.one_of(
    st.builds(WeightScheme, st.sampled_from([4, 8]), group_sizes),
    st.builds(WeightScheme, st.just(4), group_sizes, st.just(False)),
)
dtypes = st.sampled_from(list(STORED_AS))


@st.composite
def any_weights(draw: st.DrawFn, dtype: str, scheme: WeightScheme) -> Array:
    """Rows of any finite bit patterns, or of ordinary weights with zeros, whole rows of them, and outliers."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)) * (scheme.group_size or draw(st.integers(1, 7))))
    if draw(st.booleans()):
        bits_type = np.uint32 if dtype == "F32" else np.uint16
        mask = EXPONENT_MASK[dtype]
        highest = 2 ** (8 * np.dtype(bits_type).itemsize) - 1
        finite = st.integers(0, highest).filter(lambda bits: bits & mask != mask)
        return draw(hnp.arrays(bits_type, shape, elements=finite)).view(STORED_AS[dtype])
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = generator.standard_normal(shape) * draw(st.sampled_from([1e-30, 1e-7, 0.02, 300.0]))
    weights[generator.random(shape) < 0.2] *= 50
    weights[generator.random(shape) < 0.2] = 0
    weights[generator.random(len(weights)) < 0.2] = 0
    return narrow(np.float32(weights.astype(np.float16)), dtype) if dtype == "F16" else _nearest(weights, dtype)


def _nearest(weights: Array, dtype: str) -> Array:
    bits = weights.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits.view(np.float32)


def spread(values: Array, scheme: WeightScheme, input_size: int) -> Array:
    """One value per weight from one per group."""
    return np.repeat(values, scheme.group_size or input_size, axis=1)


def quantized(stored: Array, dtype: str, scheme: WeightScheme, scale_dtype: str | None = None) -> QuantizedRows:
    rows = quantize_rows(stored, dtype, scheme, scale_dtype or dtype)
    assert rows is not None
    return rows


@settings(max_examples=250, deadline=None)
@given(st.data(), dtypes, schemes)
def test_no_weight_is_off_by_more_than_half_a_step(data: st.DataObject, dtype: str, scheme: WeightScheme) -> None:
    stored = data.draw(any_weights(dtype, scheme))
    rows = quantized(stored, dtype, scheme)
    weights = widen(stored, dtype).astype(np.float64)
    scales = spread(rows.scales, scheme, weights.shape[1]).astype(np.float64)
    zeros: Array | float = float(scheme.offset)
    if rows.zero_points is not None:
        zeros = spread(rows.zero_points, scheme, weights.shape[1]).astype(np.float64)
    errors = np.abs(weights - (rows.codes - zeros) * scales)
    bound = scales / 2 * (1 + 1e-6) if scheme.is_symmetric else scales * (0.5 + 15 * UNIT[dtype])
    assert (errors <= bound).all()
    low, high = scheme.code_range
    assert rows.codes.min() >= low
    assert rows.codes.max() <= high
    assert (rows.codes[weights == 0] == np.broadcast_to(zeros, weights.shape)[weights == 0]).all()


@settings(max_examples=120, deadline=None)
@given(st.data(), dtypes, schemes)
def test_a_scale_is_the_smallest_that_reaches_its_weights(
    data: st.DataObject, dtype: str, scheme: WeightScheme
) -> None:
    stored = data.draw(any_weights(dtype, scheme))
    scales = quantized(stored, dtype, scheme).scales.astype(np.float64)
    groups = widen(stored, dtype).astype(np.float64).reshape(*scales.shape, -1)
    above, below = np.maximum(groups.max(-1), 0), np.maximum(-groups.min(-1), 0)
    if not scheme.is_symmetric:
        needed = (above + below) / 15
    elif scheme.num_bits == 8:
        needed = np.maximum(above, below) / 127
    else:
        needed = np.maximum(above / 7.5, below / 8.5)
    zero = needed == 0
    assert (scales[zero] == 1).all()
    assert (scales >= SMALLEST_NORMAL[dtype]).all()
    assert (scales >= needed)[~zero].all()
    one_less = scales * (1 - 2 * UNIT[dtype])
    assert ((one_less < needed) | (scales == SMALLEST_NORMAL[dtype]))[~zero].all()
    stored_scales = narrow(scales.astype(np.float32), dtype)
    assert (widen(stored_scales, dtype) == scales).all()  # representable


@settings(max_examples=80, deadline=None)
@given(st.data(), dtypes, schemes)
def test_errors_are_those_of_the_dequantized_weights(data: st.DataObject, dtype: str, scheme: WeightScheme) -> None:
    stored = data.draw(any_weights(dtype, scheme))
    rows = quantized(stored, dtype, scheme)
    weights = widen(stored, dtype).astype(np.float64)
    zeros: Array | float = float(scheme.offset)
    if rows.zero_points is not None:
        zeros = spread(rows.zero_points, scheme, weights.shape[1]).astype(np.float64)
    scales = spread(rows.scales, scheme, weights.shape[1]).astype(np.float64)
    squares = ((weights - (rows.codes - zeros) * scales) ** 2).sum(axis=1)
    steps = (scales**2).sum(axis=1)
    np.testing.assert_allclose(rows.errors.weight_squares, (weights**2).sum(axis=1), rtol=1e-5, atol=0)
    assert (np.abs(rows.errors.error_squares - squares) <= 1e-5 * squares + 1e-5 * steps).all()
    low, high = scheme.code_range
    assert rows.errors.num_saturated == np.isin(rows.codes, (low, high)).sum()
    assert rows.errors.num_weights == weights.size


def stored_f32(*weights: float) -> Array:
    return np.array([weights], np.float32)


def test_int8_by_hand() -> None:
    rows = quantized(stored_f32(0.5, 1.5, 2.5, -2.5, 127, -127, 0), "F32", WeightScheme(8, None))
    assert rows.scales.tolist() == [[1]]
    assert (rows.codes.astype(int) - 128).tolist() == [[0, 2, 2, -2, 127, -127, 0]]  # half to even
    assert rows.zero_points is None


def test_int4_by_hand() -> None:
    scheme = WeightScheme(4, 3)
    rows = quantized(stored_f32(7.5, -8.5, 0.5, 0, 0, 0, -17, 1, 3), "F32", scheme)
    assert rows.scales.tolist() == [[1, 1, 2]]
    assert (rows.codes.astype(int) - 8).tolist() == [[7, -8, 0, 0, 0, 0, -8, 0, 2]]
    assert dequantize_rows(rows.codes, rows.scales, None, scheme).tolist() == [[7, -8, 0, 0, 0, 0, -16, 0, 4]]


def test_asymmetric_int4_by_hand() -> None:
    scheme = WeightScheme(4, 2, is_symmetric=False)
    rows = quantized(stored_f32(-5, 10, 15, 3, -30, -2, 0, 0), "F32", scheme)
    assert rows.scales.tolist() == [[1, 1, 2, 1]]
    assert rows.zero_points is not None
    assert rows.zero_points.tolist() == [[5, 0, 15, 0]]
    assert rows.codes.tolist() == [[0, 15, 15, 3, 0, 14, 0, 0]]
    weights = dequantize_rows(rows.codes, rows.scales, rows.zero_points, scheme)
    assert weights.tolist() == [[-5, 10, 15, 3, -30, -2, 0, 0]]


def test_an_asymmetric_code_stays_in_its_range() -> None:
    rows = quantized(stored_f32(-1.5, 13.5), "F32", WeightScheme(4, None, is_symmetric=False))
    assert rows.scales.tolist() == [[1]]
    assert rows.zero_points is not None
    assert rows.zero_points.tolist() == [[2]]
    assert rows.codes.tolist() == [[0, 15]]  # 13.5 rounds to 14, and 14 + 2 is one too many


def test_float32_weights_are_rounded_by_the_exact_quotient() -> None:
    """Among a million quotients some are so near to a tie that float32 takes the wrong side."""
    weights = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    rows = quantized(weights, "F32", WeightScheme(8, None))
    scales = rows.scales.astype(np.float64)
    errors = np.abs(weights - (rows.codes - 128.0) * scales)
    assert (errors <= scales / 2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("dtype", STORED_AS)
def test_a_scale_never_underflows(dtype: str) -> None:
    tiny = narrow(np.full((1, 4), SMALLEST_NORMAL[dtype], np.float32), dtype)
    rows = quantized(tiny, dtype, WeightScheme(8, None))
    assert rows.scales.tolist() == [[SMALLEST_NORMAL[dtype]]]
    assert (rows.codes == 129).all()


@pytest.mark.parametrize("dtype", STORED_AS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_reported(dtype: str, bad: float) -> None:
    weights = np.zeros((2, 6), np.float32)
    weights[1, 4] = bad
    assert quantize_rows(narrow(weights, dtype), dtype, WeightScheme(8, 3), dtype) is None


@pytest.mark.parametrize("scheme", [WeightScheme(8, 3), WeightScheme(4, 3), WeightScheme(4, 3, is_symmetric=False)])
@pytest.mark.parametrize("dtype", STORED_AS)
@pytest.mark.parametrize("scale_dtype", STORED_AS)
@pytest.mark.parametrize("others", [-1.0, 0.0, 1.0])
def test_one_end_that_is_not_finite_is_enough(
    others: float, scale_dtype: str, dtype: str, scheme: WeightScheme
) -> None:
    for group_size in (3, LONG_GROUP):
        for bad in (np.inf, -np.inf, np.nan):
            weights = np.full((3, 2 * group_size), others, np.float32)
            weights[1, group_size + 1] = bad
            form = WeightScheme(scheme.num_bits, group_size, scheme.is_symmetric)
            assert quantize_rows(narrow(weights, dtype), dtype, form, scale_dtype) is None, bad


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FFF8001])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_no_nan_of_32_bits_slips_through(is_symmetric: bool, bits: int) -> None:
    stored = np.array([[0, bits]], np.uint32).view(np.float32)
    for scale_dtype in STORED_AS:
        assert quantize_rows(stored, "F32", WeightScheme(4, 2, is_symmetric), scale_dtype) is None


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_no_nan_of_16_bits_slips_through(sign: int) -> None:
    for dtype, infinity in (("BF16", 0x7F80), ("F16", 0x7C00)):
        for bits in range(infinity, 0x8000):
            stored = np.array([[0, bits | sign]], np.uint16).view(STORED_AS[dtype])
            assert quantize_rows(stored, dtype, WeightScheme(4, 2, is_symmetric=False), dtype) is None


def test_scales_beyond_their_dtype_are_reported() -> None:
    assert quantize_rows(stored_f32(1e9), "F32", WeightScheme(4, None), "F16") is None
    assert quantize_rows(stored_f32(3e38), "F32", WeightScheme(4, None), "BF16") is not None


@given(st.floats(0, 3.4028234663852886e38, width=32), dtypes)
def test_round_up(value: float, dtype: str) -> None:
    up = float(round_up(np.array([value]), dtype)[0])
    assert up >= value
    assert up == np.inf or up <= value * (1 + 2 * UNIT[dtype]) + 2.0**-24 * (dtype == "F16") + 2.0**-133
    assert float(round_up(np.array([up]), dtype)[0]) == up
    if dtype != "F32" and np.isfinite(up):
        assert float(widen(narrow(np.array([up], np.float32), dtype), dtype)[0]) == up


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_float_widens_as_torch_does(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(2**16, dtype=np.uint16)
    ours = widen(bits.view(STORED_AS[dtype]), dtype)
    theirs = torch.from_numpy(bits).view({"BF16": torch.bfloat16, "F16": torch.float16}[dtype]).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_a_partial_last_group_is_dequantized() -> None:
    codes = np.array([[9, 10, 11]], np.uint8)
    weights = dequantize_rows(codes, np.array([[2, 3]], np.float32), None, WeightScheme(4, 2))
    assert weights.tolist() == [[2, 4, 9]]
