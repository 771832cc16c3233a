"""The bound of sums of the tensor cores, against a model of them that gives an H200's values bit by bit."""

from typing import Any

import numpy as np
import pytest

from llmcli.lab.cases.gemm import FORMATS, activations, wide_case, with_small_scales
from llmcli.lab.matrices import StoredMatrix, random_matrix
from llmcli.lab.rows import powers_of_two, truncated_sum_bound

UNIT_INPUTS, STEP_INPUTS = 64, 16  # of 8-bit weights; of one product
FRACTION_BITS = 25  # to which addends are cut, below the largest exponent of a step
HELD = [form for form in FORMATS if form["weight_type"] != "int4"]


def hopper_sums(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights.T as wgmma sums it, 16 inputs of a unit at a time, in the order in which gemm_wide takes them.

    Each step lines up its products and the sum so far by the largest exponent; a product has that of its factors, of
    which a subnormal one has -14. Addends are cut towards zero, their exact sum again, to fp32.
    """
    padding = -x.shape[1] % UNIT_INPUTS
    x, weights = (np.pad(factors, ((0, 0), (0, padding))) for factors in (x, weights))
    total = np.zeros((len(x), len(weights)))
    for unit in range(0, x.shape[1], UNIT_INPUTS):
        for step in range(UNIT_INPUTS // STEP_INPUTS):
            inputs = [unit + 16 * lane + 4 * step + place for lane in range(4) for place in range(4)]
            these, those = x[:, None, inputs], weights[None, :, inputs]
            products = these * those
            largest = np.where(
                products != 0, np.maximum(exponents(these), -14) + np.maximum(exponents(those), -14), -99
            )
            largest = np.maximum(largest.max(axis=2), np.where(total != 0, exponents(total), -99))
            unit_in_last_place = np.ldexp(1.0, largest - FRACTION_BITS)
            addends = np.trunc(products / unit_in_last_place[..., None]).sum(axis=2) + np.trunc(
                total / unit_in_last_place
            )
            total = cut_to_fp32(addends * unit_in_last_place)
    return total


def exponents(values: np.ndarray) -> np.ndarray:
    return np.frexp(values)[1] - 1


def cut_to_fp32(values: np.ndarray) -> np.ndarray:
    unit_in_last_place = np.ldexp(1.0, exponents(values) - 23)
    return np.trunc(values / unit_in_last_place) * unit_in_last_place


def halves_of(stored: StoredMatrix) -> np.ndarray:
    return stored.weights.astype(np.float32).astype(np.float16).astype(np.float64)


def small_weights(form: dict[str, Any]) -> StoredMatrix:
    """Most are below the normal numbers of fp16."""
    return with_small_scales(random_matrix(5, num_rows=40, num_inputs=72, **form))


def test_the_model_gives_what_an_h200_gave() -> None:
    """One token with an outlier, and small weights; the exact sum is -2.41285552."""
    x, weights = activations(20, 72).astype(np.float64), halves_of(small_weights(FORMATS[0]))
    found = hopper_sums(x, weights) * powers_of_two(20)[:, None]
    assert np.float32(found[2, 16]) == np.float32(-2.41285133)


@pytest.mark.parametrize("form", HELD, ids=lambda form: "-".join(map(str, form.values())))
def test_sums_of_the_tensor_cores_lie_within_the_bound(form: dict[str, Any]) -> None:
    problems = [
        (random_matrix(1, num_rows=35, num_inputs=72, **form), 9),
        (random_matrix(1, num_rows=60, num_inputs=1000, **form), 40),
        (small_weights(form), 20),
    ]
    for stored, num_tokens in problems:
        x, weights = activations(num_tokens, stored.layout.num_inputs).astype(np.float64), halves_of(stored)
        bound = truncated_sum_bound(x, weights, UNIT_INPUTS)
        error = np.abs(hopper_sums(x, weights) - x @ weights.T)
        assert (error <= bound).all()
        # Not so wide that a product could be missing: those of the largest inputs are far larger.
        largest = np.abs(x).max(axis=1)[:, None] * np.abs(weights).max(axis=1)
        assert (bound <= 1e-3 * largest).all()


def test_a_product_is_held_to_that_bound() -> None:
    """The lab's own case: a token's result is scaled, and so is its bound. Lifted weights are over a power of two."""
    stored = small_weights(FORMATS[0])
    expected = wide_case(stored, 20).reference()["out"]
    x, scales = activations(20, 72).astype(np.float64), powers_of_two(20)[:, None]
    sums = np.ldexp(hopper_sums(x, np.ldexp(stored.halves, -stored.power)), stored.power) * scales
    assert (np.abs(sums - expected.values) <= expected.bound).all()
    assert (np.abs(sums - expected.values) > 0.05 * expected.bound).any()
