"""The helpers of the kernel tests fail when they should; on the host, with NumPy in place of CuPy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fenced import FENCE_BYTES, assert_same_bits, assert_within, fenced, to_float64

from llmcli.lab.matrices import to_bfloat16, to_storage
from llmcli.lab.rows import sum_bound


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_outputs_start_as_nan(dtype: Any) -> None:
    output = fenced((3, 5), dtype, backend=np)
    assert output.array.shape == (3, 5)
    assert output.array.dtype == dtype
    assert np.isnan(to_float64(output.array)).all()
    output.check()


def test_integers_start_as_minus_one() -> None:
    assert (fenced(4, np.int32, backend=np).array == -1).all()


def test_every_element_may_be_written() -> None:
    output = fenced((3, 5), np.float16, backend=np)
    output.array[:] = 1
    output.check()


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (-1, "1 bytes written before the array, the nearest 1 bytes"),
        (-FENCE_BYTES, f"before the array, the nearest {FENCE_BYTES} bytes"),
        (30, "1 bytes written after the array, the nearest 1 bytes"),
        (30 + FENCE_BYTES - 1, f"after the array, the nearest {FENCE_BYTES}"),
    ],
)
def test_a_stray_byte_is_found(offset: int, message: str) -> None:
    output = fenced((3, 5), np.float16, backend=np)
    output.memory[FENCE_BYTES + offset] = 0
    with pytest.raises(AssertionError, match=message):
        output.check()


def test_bfloat16_is_rounded_as_torch_does() -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    values[:4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 3e38]  # two ties
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (to_bfloat16(values) == expected).all()
    assert (to_float64(expected) == torch.from_numpy(values).to(torch.bfloat16).double().numpy()).all()
    assert (to_storage(values, np.uint16) == expected).all()
    assert to_storage(values[:2], np.float16).dtype == np.float16


def test_what_is_within_the_bound_passes() -> None:
    assert_within(np.float32([1.0, 2.5]), np.array([1.0, 2.0]), np.array([0.0, 0.5]))
    assert_within(np.uint16([0x3F80]), np.array([1.0]), 0.0)


@pytest.mark.parametrize("wrong", [2.51, np.nan, np.inf])
def test_what_is_not_is_named(wrong: float) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 elements are out of bounds; worst at \[1\]"):
        assert_within(np.float32([1.0, wrong]), np.array([1.0, 2.0]), 0.5)


def test_shapes_and_the_references_precision_matter() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        assert_within(np.zeros(2, np.float32), np.zeros((1, 2)), 1.0)
    with pytest.raises(AssertionError, match="float64"):
        assert_within(np.zeros(2, np.float32), np.zeros(2, np.float32), 1.0)


@pytest.mark.parametrize(("num_terms", "lost"), [(256, 0), (4096, 0), (4096, 1)])
def test_the_bound_passes_rounding_and_not_a_lost_product(num_terms: int, lost: int) -> None:
    random = np.random.default_rng(num_terms)
    a, b = (random.standard_normal((100, num_terms)).astype(np.float16) for _ in range(2))
    products = a.astype(np.float64) * b.astype(np.float64)
    reference = products.sum(axis=1)
    bound = sum_bound(reference, np.abs(products).sum(axis=1), num_terms, np.float32)
    actual = products[:, lost:].astype(np.float32).sum(axis=1)
    outside = np.abs(actual - reference) > bound
    assert outside.mean() > 0.9 if lost else not outside.any()


def runs(*results: Any) -> Iterator[Any]:
    yield from results


def test_the_same_bits_twice() -> None:
    nan = np.float32([np.nan, 1])
    again = runs(nan, nan.copy())
    assert_same_bits(lambda: next(again))
    two = runs((nan, nan), (nan, nan[::1]))
    assert_same_bits(lambda: next(two))


def test_other_bits_are_found() -> None:
    zeros = runs(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]))
    with pytest.raises(AssertionError, match="array 0: 1 bytes differ"):
        assert_same_bits(lambda: next(zeros))


def test_a_run_may_overwrite_the_result_of_the_one_before() -> None:
    output = np.float32([0])

    def run() -> np.ndarray:
        output[0] += 1
        return output

    with pytest.raises(AssertionError, match="differ between two runs"):
        assert_same_bits(run)
