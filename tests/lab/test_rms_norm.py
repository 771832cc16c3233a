"""rms_norm against float64: every form and type, rows that need a scale, rows of zeros."""

from typing import Any

import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.lab.cases.reductions import rms_norm_case
from llmcli.lab.matrices import STORAGE
from llmcli.lab.row_kernels import rms_norm_cost
from llmcli.lab.rows import COLUMNS


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_rows", [1, 6, 33])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rows(device: Device, num_columns: int, num_rows: int, dtype: Any) -> None:
    assert_right(device, rms_norm_case(num_rows, num_columns, dtype))


def test_cost_counts_every_byte_once() -> None:
    cost = rms_norm_cost(num_rows=3, num_columns=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 8 + 8) * 4, 3 * 8 * 2 + 3 * 4)
