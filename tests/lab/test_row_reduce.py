"""row_reduce against float64: three forms, four operations, ties, NaN, infinities, rows with tails of any length."""

import pytest
from launched import launched_by
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.lab.cases.reductions import OPS, row_reduce_case, row_reduce_masked_case, row_reduce_specials_case
from llmcli.lab.problem import Problem
from llmcli.lab.row_kernels import MAX_SPLITS, RowOp, row_reduce_cost, split_columns

# Columns, and the gap between the end of a row and the next one: padded to 16, one more, nothing.
SHAPES = [(1, 0), (7, 1), (40, 8), (64, 0), (1003, 5), (1024, 0), (1025, 0), (4096, 0), (11008, 0), (14336, 0)]
LONG = [(8192, 0), (32001, 15), (50257, 0), (128256, 0)]


def check(device: Device, problem: Problem, split: bool = False) -> None:
    """The problem is right, and is solved in this form."""
    device.noted = []
    assert_right(device, problem)
    assert len(launched_by(device)) == 2
    assert all(name.startswith("row_reduce_split<") == split for _, name in launched_by(device))


@pytest.mark.cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize(("num_columns", "extra"), SHAPES + LONG)
def test_rows(device: Device, num_columns: int, extra: int, num_rows: int, op: RowOp) -> None:
    check(device, row_reduce_case(op, num_rows, num_columns, extra, split=False))


@pytest.mark.cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("num_columns", "extra"), LONG)
def test_few_long_rows(device: Device, num_columns: int, extra: int, num_rows: int, op: RowOp) -> None:
    check(device, row_reduce_case(op, num_rows, num_columns, extra, split=True), split=True)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_columns", "split"), [(33, False), (1029, False), (9001, False), (9001, True), (128256, False), (128256, True)]
)
def test_argmax_takes_the_first_of_the_largest(device: Device, num_columns: int, split: bool) -> None:
    check(device, row_reduce_specials_case("argmax", num_columns, split), split)
    check(device, row_reduce_specials_case("max", num_columns, split), split)


@pytest.mark.cuda
@pytest.mark.parametrize("split", [False, True])
def test_log_sum_exp_of_masked_rows(device: Device, split: bool) -> None:
    check(device, row_reduce_masked_case(split), split)


@pytest.mark.parametrize("num_columns", [8192, 8193, 32001, 50257, 128256, 131072, 131073, 262208, 1_000_003])
def test_parts_are_whole_vectors_that_cover_a_row(num_columns: int) -> None:
    columns = split_columns(num_columns)
    num_splits = -(-num_columns // columns)
    assert columns % 4 == 0
    assert 2 <= num_splits <= MAX_SPLITS
    assert (num_splits - 1) * columns < num_columns <= num_splits * columns


def test_cost_counts_every_byte_once() -> None:
    cost = row_reduce_cost(num_rows=3, num_columns=8)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 4, 3 * 4)
