"""gather_columns against NumPy: no bit changes, nothing else is written, and what does not fit is refused."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import gather_columns, gather_columns_cost
from llmcli.lab.cases.elementwise import gather_columns_case
from llmcli.lab.rows import COLUMNS


@pytest.mark.cuda
@pytest.mark.parametrize("unit_inputs", [0, 64, 128])
@pytest.mark.parametrize("num_rows", [1, 6, 33])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rows(device: Device, num_columns: int, num_rows: int, unit_inputs: int) -> None:
    assert_right(device, gather_columns_case(num_rows, num_columns, unit_inputs))


@pytest.mark.cuda
def test_an_order_of_other_columns_is_refused(device: Device) -> None:
    import cupy

    x, order = cupy.zeros((2, 16), np.float16), cupy.zeros(15, np.int32)
    with pytest.raises(ValueError, match=r"gather_columns: order is \[15\], expected \[16\]"):
        gather_columns(device, x=x, order=order, out=cupy.zeros((2, 16), np.float16))


def test_cost_counts_every_byte_once() -> None:
    cost = gather_columns_cost(num_rows=3, num_columns=8)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 2 + 8 * 4, 3 * 8 * 2)
