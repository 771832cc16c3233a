"""row_reduce against float64: three forms, four operations, ties, NaN, infinities, rows with tails of any length."""

from typing import Any

import numpy as np
import pytest
from fenced import Fenced, assert_same_bits, assert_within, fenced, sum_bound, to_host
from row_data import EPSILON, make_rows, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.row_reduce import MAX_SPLITS, RowOp, row_reduce, row_reduce_cost, split_columns

OPS: tuple[RowOp, ...] = ("sum", "max", "argmax", "log_sum_exp")
# Columns and what lies between the end of a row and the next one: padded to 16, one more, nothing.
SHAPES = [(1, 0), (7, 1), (40, 8), (64, 0), (1003, 5), (1024, 0), (1025, 0), (4096, 0), (11008, 0), (14336, 0)]
LONG = [(8192, 0), (32001, 15), (50257, 0), (128256, 0)]


def reduced(device: Device, op: RowOp, x: np.ndarray, extra: int = 0, split: bool = False) -> np.ndarray:
    """One reduction of rows in a wider buffer of NaN, with all that must hold of any of them."""
    import cupy

    num_rows, num_columns = x.shape
    wide = np.full((num_rows, num_columns + extra), np.nan, np.float32)
    wide[:, :num_columns] = x
    buffer = cupy.asarray(wide)
    out = fenced((num_rows,), np.int32 if op == "argmax" else np.float32)
    workspace: dict[str, Any] = {}
    fences: list[Fenced] = [out]
    if split:
        partials, counters = fenced((num_rows, 2 * MAX_SPLITS), np.float32), fenced((num_rows,), np.int32)
        counters.array[...] = 0
        workspace = {"partials": partials.array, "counters": counters.array}
        fences += [partials, counters]
    device.trace = []

    def call() -> Any:
        row_reduce(device, op=op, x=buffer[:, :num_columns], out=out.array, **workspace)
        return out.array

    with unchanged(buffer):
        assert_same_bits(call)
    assert device.trace is not None
    assert all(name.startswith("row_reduce_split<") == split for _, name in device.trace)
    for fence in fences:
        fence.check()
    if split:
        assert not to_host(workspace["counters"]).any()
    return to_host(out.array)


def log_sum_exp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float64 value and the bound of one in fp32, in any order of any parts."""
    wide = x.astype(np.float64)
    maximum = wide.max(axis=1, keepdims=True)
    powers = np.exp(wide - maximum)
    total = powers.sum(axis=1, keepdims=True)
    # x - max is rounded before it is raised; each of at most a dozen new maxima costs 5 roundings.
    distance = (powers * (maximum - wide)).sum(axis=1, keepdims=True) / total
    log = np.log(total)
    roundings = 3 * (np.abs(maximum) + np.abs(log)) + 2 * distance + np.sqrt(x.shape[1]) + 64
    return (maximum + log)[:, 0], (EPSILON * roundings)[:, 0]


def check_against_reference(op: RowOp, x: np.ndarray, actual: np.ndarray) -> None:
    wide = x.astype(np.float64)
    if op == "sum":
        reference = wide.sum(axis=1)
        assert_within(actual, reference, sum_bound(reference, np.abs(wide).sum(axis=1), x.shape[1], np.float32))
    elif op == "log_sum_exp":
        assert_within(actual, *log_sum_exp(x))
    else:
        assert np.array_equal(actual, x.max(axis=1) if op == "max" else x.argmax(axis=1))


@pytest.mark.cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize(("num_columns", "extra"), SHAPES + LONG)
def test_rows(device: Device, num_columns: int, extra: int, num_rows: int, op: RowOp) -> None:
    x = make_rows(num_rows, num_columns)
    check_against_reference(op, x, reduced(device, op, x, extra))


@pytest.mark.cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("num_columns", "extra"), LONG)
def test_few_long_rows(device: Device, num_columns: int, extra: int, num_rows: int, op: RowOp) -> None:
    x = make_rows(num_rows, num_columns)
    check_against_reference(op, x, reduced(device, op, x, extra, split=True))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_columns", "split"), [(33, False), (1029, False), (9001, False), (9001, True), (128256, False), (128256, True)]
)
def test_argmax_takes_the_first_of_the_largest(device: Device, num_columns: int, split: bool) -> None:
    generator = np.random.default_rng(num_columns)
    x = generator.normal(size=(6, num_columns)).astype(np.float32)
    x[0, [num_columns // 2, num_columns - 1]] = 9
    x[1] = -np.inf
    x[2, [num_columns // 3, num_columns // 2]] = np.nan
    x[3, [num_columns // 4, num_columns - 2]] = np.inf
    x[4] = 0
    x[4, num_columns // 5 :] = -0.0
    x[5, num_columns - 1] = 7
    assert np.array_equal(reduced(device, "argmax", x, split=split), x.argmax(axis=1))
    assert np.array_equal(reduced(device, "max", x, split=split), x.max(axis=1), equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("split", [False, True])
def test_log_sum_exp_of_masked_rows(device: Device, split: bool) -> None:
    x = np.random.default_rng(5).normal(size=(4, 20000)).astype(np.float32)
    x[0] = -np.inf
    x[1, 10:] = -np.inf
    x[2, :19990] = -np.inf
    x[3, 777] = np.nan
    actual = reduced(device, "log_sum_exp", x, split=split)
    assert actual[0] == -np.inf
    assert np.isnan(actual[3])
    for row in (1, 2):
        finite = x[row : row + 1, np.isfinite(x[row])]
        assert_within(actual[row : row + 1], *log_sum_exp(finite))


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
