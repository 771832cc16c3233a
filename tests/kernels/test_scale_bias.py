"""scale_bias against float64: with and without scale and bias, inside a wider buffer, on rows of any alignment."""

import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.norms import scale_bias_cost
from llmcli.lab.cases.elementwise import scale_bias_case


@pytest.mark.cuda
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 5)])
@pytest.mark.parametrize("num_columns", [1, 7, 40, 172, 1024, 1025, 4096, 4099, 6144, 12288])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, has_scale: bool, has_bias: bool) -> None:
    assert_right(device, scale_bias_case(num_rows, num_columns, extra, has_scale, has_bias))


def test_cost_counts_every_byte_once() -> None:
    cost = scale_bias_cost(num_rows=3, num_columns=8, has_bias=True)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 8 + 3 + 8) * 4, 3 * 8 * 4)
