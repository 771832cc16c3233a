"""residual_add against float64: with and without scale and bias, products with padded rows, x left as it is."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_host
from row_data import EPSILON, make_rows, powers_of_two, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.residual_add import residual_add, residual_add_cost


@pytest.mark.cuda
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 5)])
@pytest.mark.parametrize("num_columns", [1, 7, 40, 172, 1024, 1025, 4096, 4099, 5120])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, has_scale: bool, has_bias: bool) -> None:
    import cupy

    x, before = make_rows(num_rows, num_columns + extra), make_rows(num_rows, num_columns, seed=1)[::-1].copy()
    scale = powers_of_two(num_rows) if has_scale else None
    bias = np.random.default_rng(3).normal(size=num_columns).astype(np.float32) if has_bias else None
    given = [None if values is None else cupy.asarray(values) for values in (scale, bias, x)]
    hidden = fenced(before.shape, np.float32)

    def call() -> Any:
        hidden.array[...] = cupy.asarray(before)
        residual_add(device, x=given[2], row_scale=given[0], bias=given[1], hidden=hidden.array)
        return hidden.array

    with unchanged(*(array for array in given if array is not None)):
        assert_same_bits(call)
    hidden.check()
    added = x[:, :num_columns].astype(np.float64) * (1.0 if scale is None else scale[:, None])
    if bias is not None:
        added = added + bias
    reference = before + added
    assert_within(to_host(hidden.array), reference, EPSILON * (np.abs(reference) * (1 + EPSILON) + np.abs(added)))


@pytest.mark.cuda
def test_a_product_narrower_than_the_residual_stream_is_refused(device: Device) -> None:
    import cupy

    x, hidden = cupy.zeros((2, 16), np.float32), cupy.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="x has 16 columns, hidden has 32"):
        residual_add(device, x=x, row_scale=None, bias=None, hidden=hidden)


def test_cost_counts_every_byte_once() -> None:
    cost = residual_add_cost(num_rows=3, num_columns=8, has_bias=True)
    assert (cost.read_bytes, cost.written_bytes) == ((2 * 3 * 8 + 3 + 8) * 4, 3 * 8 * 4)
