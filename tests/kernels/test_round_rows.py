"""round_rows against float64: nothing but one rounding, and a power of two where float16 would overflow."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced, to_host, to_storage
from row_data import COLUMNS, STORAGE, assert_rounded, make_rows, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.round_rows import round_rows, round_rows_cost


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_rows", [1, 6, 33])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rows(device: Device, num_columns: int, num_rows: int, dtype: Any) -> None:
    import cupy

    x = make_rows(num_rows, num_columns)
    x_device = cupy.asarray(x)
    out, row_scale = fenced(x.shape, dtype), fenced((num_rows,), np.float32)

    def call() -> tuple[Any, Any]:
        round_rows(device, x=x_device, out=out.array, row_scale=row_scale.array)
        return out.array, row_scale.array

    with unchanged(x_device):
        assert_same_bits(call)
    out.check()
    row_scale.check()
    assert_rounded(out.array, row_scale.array, x.astype(np.float64), 0.0)
    scaled = x / to_host(row_scale.array)[:, None]
    assert np.array_equal(to_host(out.array), to_storage(scaled, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("largest", [2.0**15, np.nextafter(np.float32(2.0**15), np.float32(1e9)), 65504.0, 3e38])
def test_the_scale_starts_above_two_to_the_fifteenth(device: Device, largest: float) -> None:
    import cupy

    x = np.array([[1.0, -largest, 0.5, 2.0]], np.float32)
    out, row_scale = fenced(x.shape, np.float16), fenced((1,), np.float32)
    round_rows(device, x=cupy.asarray(x), out=out.array, row_scale=row_scale.array)
    expected = 1.0 if largest <= 2.0**15 else 2.0 ** (np.floor(np.log2(float(x[0, 1].__abs__()))) - 14)
    assert to_host(row_scale.array)[0] == expected
    assert np.array_equal(to_host(out.array), (x / np.float32(expected)).astype(np.float16))


@pytest.mark.cuda
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_stays_visible_and_alone(device: Device, broken: float) -> None:
    import cupy

    x = make_rows(2, 512)
    x[0, 300] = broken
    out, row_scale = fenced(x.shape, np.float16), fenced((2,), np.float32)
    round_rows(device, x=cupy.asarray(x), out=out.array, row_scale=row_scale.array)
    values = to_host(out.array)
    assert not np.isfinite(values[0, 300])
    assert np.array_equal(values[1], x[1].astype(np.float16))


def test_cost_counts_every_byte_once() -> None:
    cost = round_rows_cost(num_rows=3, num_columns=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 4, 3 * 8 * 2 + 3 * 4)
