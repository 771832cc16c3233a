"""softmax and log-softmax against float64: every form, masked columns, huge logits, rows with tails of any length."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_host
from row_data import EPSILON, make_rows, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.softmax import softmax, softmax_cost

# Columns and what lies between the end of a row and the next one.
SHAPES = [(1, 0), (7, 1), (40, 8), (64, 0), (256, 0), (1003, 5), (1024, 0), (4096, 0), (5120, 0), (9001, 0), (14336, 0)]
LONG = [(32001, 15), (50257, 0), (128256, 0)]


def run(device: Device, x: np.ndarray, extra: int, log: bool) -> np.ndarray:
    import cupy

    num_rows, num_columns = x.shape
    wide = np.full((num_rows, num_columns + extra), np.nan, np.float32)
    wide[:, :num_columns] = x
    buffer = cupy.asarray(wide)
    out = fenced(wide.shape, np.float32)

    def call() -> Any:
        softmax(device, x=buffer[:, :num_columns], out=out.array[:, :num_columns], log=log)
        return out.array

    with unchanged(buffer):
        assert_same_bits(call)
    out.check()
    values = to_host(out.array)
    assert np.isnan(values[:, num_columns:]).all(), "columns beside the row were written"
    return values[:, :num_columns]


def check_against_reference(x: np.ndarray, actual: np.ndarray, log: bool) -> None:
    wide = x.astype(np.float64)
    maximum = wide.max(axis=1, keepdims=True)
    distance = maximum - wide
    powers = np.exp(-distance)
    total = powers.sum(axis=1, keepdims=True)
    # The sum's error as in log_sum_exp's test; x - max is rounded before it is raised.
    mean_distance = (powers * np.where(powers > 0, distance, 0.0)).sum(axis=1, keepdims=True) / total
    of_sum = 2 * mean_distance + np.sqrt(x.shape[1]) + 64
    if log:
        finite = np.isfinite(wide)
        assert np.array_equal(np.isneginf(actual), ~finite)
        reference = np.where(finite, -distance - np.log(total), 0.0)
        bound = EPSILON * (2 * np.abs(reference) + np.where(finite, distance, 0.0) + 2 * np.log(total) + of_sum)
        assert_within(np.where(finite, actual, 0.0), reference, bound)
    else:
        reference = powers / total
        # Below the smallest normal number expf may give 0.
        roundings = 8 + np.where(powers > 0, distance, 0.0) + of_sum
        assert_within(actual, reference, EPSILON * roundings * reference + 2.0**-126)


@pytest.mark.cuda
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize(("num_columns", "extra"), SHAPES + LONG)
def test_rows(device: Device, num_columns: int, extra: int, num_rows: int, log: bool) -> None:
    x = make_rows(num_rows, num_columns)
    check_against_reference(x, run(device, x, extra, log), log)


@pytest.mark.cuda
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("num_columns", [40, 1003, 128256])
def test_masked_columns(device: Device, num_columns: int, log: bool) -> None:
    x = np.random.default_rng(7).normal(scale=3, size=(5, num_columns)).astype(np.float32)
    x[0, : num_columns - 1] = -np.inf
    x[1, 5:] = -np.inf
    x[2, ::2] = -np.inf
    x[3] = -np.inf
    x[4, num_columns // 2] = np.nan
    actual = run(device, x, 0, log)
    assert np.isnan(actual[3:]).all()
    check_against_reference(x[:3], actual[:3], log)


def test_cost_counts_every_byte_once() -> None:
    cost = softmax_cost(num_rows=3, num_columns=8)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 4, 3 * 8 * 4)
