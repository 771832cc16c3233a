"""round_rows against float64: nothing but one rounding, and a power of two where float16 would overflow."""

from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_host
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.norms import round_rows, round_rows_cost
from llmcli.lab.cases.elementwise import round_rows_case
from llmcli.lab.matrices import STORAGE
from llmcli.lab.rows import COLUMNS, make_rows


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_rows", [1, 6, 33])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rows(device: Device, num_columns: int, num_rows: int, dtype: Any) -> None:
    assert_right(device, round_rows_case(num_rows, num_columns, dtype))


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
