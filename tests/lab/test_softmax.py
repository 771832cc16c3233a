"""softmax and log-softmax against float64: every form, masked columns, huge logits, rows with tails of any length."""

import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.lab.cases.reductions import softmax_case, softmax_masked_case
from llmcli.lab.row_kernels import softmax_cost

# Columns, and the gap between the end of a row and the next one.
SHAPES = [(1, 0), (7, 1), (40, 8), (64, 0), (256, 0), (1003, 5), (1024, 0), (4096, 0), (5120, 0), (9001, 0), (14336, 0)]
LONG = [(32001, 15), (50257, 0), (128256, 0)]


@pytest.mark.cuda
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize(("num_columns", "extra"), SHAPES + LONG)
def test_rows(device: Device, num_columns: int, extra: int, num_rows: int, log: bool) -> None:
    assert_right(device, softmax_case(num_rows, num_columns, extra, log))


@pytest.mark.cuda
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("num_columns", [40, 1003, 128256])
def test_masked_columns(device: Device, num_columns: int, log: bool) -> None:
    assert_right(device, softmax_masked_case(num_columns, log))


def test_cost_counts_every_byte_once() -> None:
    cost = softmax_cost(num_rows=3, num_columns=8)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 4, 3 * 8 * 4)
