"""quantize_rows against the CPU's quantizing, bit for bit; only sums of squares may differ, by float64 rounding."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced, to_host

from llmcli.kernels.device import Device
from llmcli.kernels.quantize_rows import LONG_GROUP, quantize_rows, quantize_rows_cost
from llmcli.lab.cases.weights import SCALE_TYPES, any_bits, form_of, on_the_grid, ordinary
from llmcli.quantization import rounding
from llmcli.quantization.rounding import STORED_AS, narrow, pack_rows
from llmcli.quantization.schemes import WeightScheme, packed_size

KINDS = [(8, True), (4, True), (4, False), (8, False)]
# Rows that end inside a vector, a word, a block's stride; groups that end inside a thread's codes; long groups.
SHAPES = [
    (1, 1, None),
    (5, 96, 32),
    (3, 250, None),
    (4, 12, 3),
    (2, 7, 1),
    (3, 4096, 128),
    (2, 3 * (LONG_GROUP + 2), LONG_GROUP + 2),
]
SHAPES += [(2, 2 * LONG_GROUP, LONG_GROUP), (37, 64, 64), (2, 11008, None), (3, 2049, None)]


def run(device: Device, stored: np.ndarray, scheme: WeightScheme, scale_dtype: str) -> dict[str, Any]:
    import cupy

    (num_rows, num_inputs), num_groups = stored.shape, scheme.num_groups(stored.shape[1])
    out = {
        "packed": fenced((num_rows, packed_size(num_inputs, scheme.num_bits)), np.uint32),
        "scales": fenced((num_rows, num_groups), np.float32),
        "squares": fenced((num_rows, 2), np.float64),
        "num_saturated": fenced((num_rows,), np.int32),
    }
    if not scheme.is_symmetric:
        out["zero_points"] = fenced((num_rows, num_groups), np.uint8)
    weights = cupy.asarray(stored)
    arrays = {name: one.array for name, one in out.items()}

    def call() -> tuple[Any, ...]:
        quantize_rows(
            device,
            weights=weights,
            form=form_of(scheme),
            scale_type=SCALE_TYPES[scale_dtype],
            **{"zero_points": None, **arrays},
        )
        return tuple(arrays.values())

    assert_same_bits(call)
    for one in out.values():
        one.check()
    assert np.array_equal(weights.get().view(np.uint8), stored.view(np.uint8))
    return {name: to_host(array) for name, array in arrays.items()}


@pytest.mark.cuda
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", STORED_AS)
@pytest.mark.parametrize("scale_dtype", STORED_AS)
@pytest.mark.parametrize(("bits", "is_symmetric"), KINDS)
@pytest.mark.parametrize("make", [ordinary, any_bits, on_the_grid])
def test_bits_are_those_of_the_cpu(
    device: Device, make: Any, bits: int, is_symmetric: bool, scale_dtype: str, dtype: str
) -> None:
    for num_rows, num_inputs, group_size in SHAPES:
        if group_size is not None and num_inputs % group_size:
            continue
        stored = make((num_rows, num_inputs), dtype)
        scheme = WeightScheme(bits, group_size, is_symmetric)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = rounding.quantize_rows(stored, dtype, scheme, scale_dtype)
        found = run(device, stored, scheme, scale_dtype)
        assert np.isfinite(found["scales"]).all() == (expected is not None)
        if expected is None:
            continue
        assert np.array_equal(found["scales"].view(np.uint32), expected.scales.view(np.uint32))
        assert np.array_equal(found["packed"].view(np.int32), pack_rows(expected.codes, bits))
        if expected.zero_points is not None:
            assert np.array_equal(found["zero_points"], expected.zero_points)
        assert found["num_saturated"].sum() == expected.errors.num_saturated
        np.testing.assert_allclose(found["squares"][:, 0], expected.errors.error_squares, rtol=1e-12, atol=0)
        np.testing.assert_allclose(found["squares"][:, 1], expected.errors.weight_squares, rtol=1e-12, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORED_AS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group_size", [3, LONG_GROUP])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_group_that_is_not_finite_is_marked_and_alone(
    device: Device, is_symmetric: bool, group_size: int, bad: float, dtype: str
) -> None:
    weights = np.ones((3, 2 * group_size), np.float32)
    weights[1, group_size + 1] = bad
    scheme = WeightScheme(4, group_size, is_symmetric)
    scales = run(device, narrow(weights, dtype), scheme, dtype)["scales"]
    assert np.isfinite(scales).tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_no_nan_slips_through_as_a_scale_is_rounded_up(device: Device, bits: int) -> None:
    stored = np.array([[0, bits]], np.uint32).view(np.float32)
    for is_symmetric in (True, False):
        assert not np.isfinite(run(device, stored, WeightScheme(4, 2, is_symmetric), "BF16")["scales"]).any()


@pytest.mark.cuda
def test_the_bounds_of_a_float16_scale(device: Device) -> None:
    limits = np.float32([65504, np.nextafter(np.float32(65504), np.float32(1e9)), 2.0**-14, 2.0**-24, 1 + 2.0**-11])
    stored = np.ascontiguousarray((limits * np.float32(127))[:, None])
    scales = run(device, stored, WeightScheme(8, None), "F16")["scales"][:, 0]
    assert scales.tolist() == [65504, np.inf, 2.0**-14, 2.0**-14, 1 + 2.0**-10]


@pytest.mark.cuda
def test_arguments_are_checked(device: Device) -> None:
    import cupy

    def call(**changes: Any) -> None:
        arrays = {
            "weights": cupy.zeros((2, 12), np.float32),
            "scales": cupy.zeros((2, 3), np.float32),
            "zero_points": None,
            "packed": cupy.zeros((2, 2), np.uint32),
            "squares": cupy.zeros((2, 2), np.float64),
            "num_saturated": cupy.zeros(2, np.int32),
        }
        form = form_of(WeightScheme(4, 4))
        quantize_rows(device, **{**arrays, "form": form, "scale_type": "float32", **changes})

    call()
    for name, wrong in (
        ("weights", cupy.zeros((2, 12), np.float64)),
        ("scales", cupy.zeros((2, 5), np.float32)),
        ("zero_points", cupy.zeros((2, 2), np.uint8)),
        ("packed", cupy.zeros((2, 3), np.uint32)),
        ("squares", cupy.zeros((2, 2), np.float32)),
        ("num_saturated", cupy.zeros(1, np.int32)),
        ("scale_type", "float64"),
    ):
        with pytest.raises(ValueError, match="quantize_rows: "):
            call(**{name: wrong})


def test_cost_counts_every_byte() -> None:
    cost = quantize_rows_cost(num_rows=3, num_inputs=64, num_groups=2, num_bits=4, is_symmetric=False, itemsize=2)
    assert cost.read_bytes == 2 * 3 * 64 * 2 + 3 * 2 * 5
    assert cost.written_bytes == 3 * (32 + 20) + 3 * 2 * 5
