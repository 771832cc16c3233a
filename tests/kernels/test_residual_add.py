"""residual_add against float64: with and without scale and bias, products with padded rows, x left as it is."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.norms import residual_add, residual_add_cost
from llmcli.lab.cases.elementwise import residual_add_case


@pytest.mark.cuda
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 5)])
@pytest.mark.parametrize("num_columns", [1, 7, 40, 172, 1024, 1025, 4096, 4099, 5120])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, has_scale: bool, has_bias: bool) -> None:
    assert_right(device, residual_add_case(num_rows, num_columns, extra, has_scale, has_bias))


@pytest.mark.cuda
def test_a_product_narrower_than_the_residual_stream_is_refused(device: Device) -> None:
    import cupy

    x, hidden = cupy.zeros((2, 16), np.float32), cupy.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="x has 16 columns, hidden has 32"):
        residual_add(device, x=x, row_scale=None, bias=None, hidden=hidden)


def test_cost_counts_every_byte_once() -> None:
    cost = residual_add_cost(num_rows=3, num_columns=8, has_bias=True)
    assert (cost.read_bytes, cost.written_bytes) == ((2 * 3 * 8 + 3 + 8) * 4, 3 * 8 * 4)
