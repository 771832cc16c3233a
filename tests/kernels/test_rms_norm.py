"""rms_norm against float64: every form and type, rows that need a scale, rows of zeros."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced
from row_data import COLUMNS, EPSILON, STORAGE, assert_rounded, make_rows, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.rms_norm import rms_norm, rms_norm_cost

EPS = 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_rows", [1, 6, 33])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rows(device: Device, num_columns: int, num_rows: int, dtype: Any) -> None:
    import cupy

    x = make_rows(num_rows, num_columns)
    generator = np.random.default_rng(num_columns)
    # Weights of 1e4 put rows above 2^15.
    weight = (generator.uniform(0.5, 2.0, num_columns) * generator.choice([-1, 1, 1e4], num_columns)).astype(np.float32)
    x_device, weight_device = cupy.asarray(x), cupy.asarray(weight)
    out, row_scale = fenced(x.shape, dtype), fenced((num_rows,), np.float32)

    def call() -> tuple[Any, Any]:
        rms_norm(device, x=x_device, weight=weight_device, eps=EPS, out=out.array, row_scale=row_scale.array)
        return out.array, row_scale.array

    with unchanged(x_device, weight_device):
        assert_same_bits(call)
    out.check()
    row_scale.check()
    wide = x.astype(np.float64)
    reference = weight * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + np.float32(EPS).astype(np.float64))
    # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products.
    assert_rounded(out.array, row_scale.array, reference, (np.sqrt(num_columns) / 2 + 7) * EPSILON)


def test_cost_counts_every_byte_once() -> None:
    cost = rms_norm_cost(num_rows=3, num_columns=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 8 + 8) * 4, 3 * 8 * 2 + 3 * 4)
