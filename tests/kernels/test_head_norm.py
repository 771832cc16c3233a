"""head_norm against float64: every head size, heads inside a wider buffer, whose other columns stay as they are."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_host
from row_data import EPSILON, make_rows

from llmcli.kernels.device import Device
from llmcli.kernels.head_norm import head_norm, head_norm_cost

EPS = 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [4, 6, 8, 16, 20, 32, 40, 64, 80, 96, 100, 128, 160, 254, 256])
@pytest.mark.parametrize(("num_rows", "num_heads"), [(1, 1), (1, 32), (7, 3), (40, 8)])
@pytest.mark.parametrize("offset", [0, 16])
def test_heads(device: Device, num_rows: int, num_heads: int, head_dim: int, offset: int) -> None:
    import cupy

    width = num_heads * head_dim
    heads = make_rows(num_rows * num_heads, head_dim).reshape(num_rows, width)
    before = np.random.default_rng(1).normal(size=(num_rows, offset + width + 16)).astype(np.float32)
    before[:, offset : offset + width] = heads
    weight = np.random.default_rng(2).uniform(-2, 2, head_dim).astype(np.float32)
    weight_device = cupy.asarray(weight)
    buffer = fenced(before.shape, np.float32)

    def call() -> Any:
        buffer.array[...] = cupy.asarray(before)
        head_norm(device, x=buffer.array[:, offset : offset + width], weight=weight_device, eps=EPS)
        return buffer.array

    assert_same_bits(call)
    buffer.check()
    after = to_host(buffer.array)
    assert np.array_equal(after[:, :offset], before[:, :offset])
    assert np.array_equal(after[:, offset + width :], before[:, offset + width :])
    assert np.array_equal(to_host(weight_device), weight)
    wide = heads.reshape(num_rows, num_heads, head_dim).astype(np.float64)
    reference = weight * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(EPS).astype(np.float64))
    # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products, one of them the store's.
    bound = (2 + np.sqrt(head_dim) / 2 + 7) * EPSILON * np.abs(reference) + 2.0**-150
    assert_within(after[:, offset : offset + width].reshape(wide.shape), reference, bound)


@pytest.mark.cuda
@pytest.mark.parametrize(("num_columns", "head_dim"), [(96, 64), (514, 257)])
def test_columns_that_are_not_whole_heads_are_refused(device: Device, num_columns: int, head_dim: int) -> None:
    import cupy

    x, weight = cupy.zeros((2, num_columns), np.float32), cupy.zeros(head_dim, np.float32)
    with pytest.raises(ValueError, match="head_norm: x has"):
        head_norm(device, x=x, weight=weight, eps=EPS)


def test_cost_counts_every_byte_once() -> None:
    cost = head_norm_cost(num_rows=3, num_heads=2, head_dim=8)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 2 * 8 + 8) * 4, 3 * 2 * 8 * 4)
