"""scale_bias against float64: with and without scale and bias, inside a wider buffer, on rows of any alignment."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_host
from row_data import EPSILON, make_rows, powers_of_two, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.scale_bias import scale_bias, scale_bias_cost


@pytest.mark.cuda
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 5)])
@pytest.mark.parametrize("num_columns", [1, 7, 40, 172, 1024, 1025, 4096, 4099, 6144, 12288])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, has_scale: bool, has_bias: bool) -> None:
    import cupy

    before = make_rows(num_rows, num_columns + extra)
    scale = powers_of_two(num_rows) if has_scale else None
    bias = np.random.default_rng(3).normal(size=num_columns).astype(np.float32) if has_bias else None
    given = [None if values is None else cupy.asarray(values) for values in (scale, bias)]
    buffer = fenced(before.shape, np.float32)

    def call() -> Any:
        buffer.array[...] = cupy.asarray(before)
        scale_bias(device, x=buffer.array[:, :num_columns], row_scale=given[0], bias=given[1])
        return buffer.array

    with unchanged(*(array for array in given if array is not None)):
        assert_same_bits(call)
    buffer.check()
    after = to_host(buffer.array)
    assert np.array_equal(after[:, num_columns:], before[:, num_columns:])
    reference = before[:, :num_columns].astype(np.float64) * (1.0 if scale is None else scale[:, None])
    if bias is not None:
        reference = reference + bias
    assert_within(after[:, :num_columns], reference, EPSILON * np.abs(reference))


def test_cost_counts_every_byte_once() -> None:
    cost = scale_bias_cost(num_rows=3, num_columns=8, has_bias=True)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 8 + 3 + 8) * 4, 3 * 8 * 4)
