"""head_norm against float64: every head size, heads inside a wider buffer, whose other columns stay as they are."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.norms import head_norm, head_norm_cost
from llmcli.lab.cases.reductions import head_norm_case

EPS = 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [4, 6, 8, 16, 20, 32, 40, 64, 80, 96, 100, 128, 160, 254, 256])
@pytest.mark.parametrize(("num_rows", "num_heads"), [(1, 1), (1, 32), (7, 3), (40, 8)])
@pytest.mark.parametrize("offset", [0, 16])
def test_heads(device: Device, num_rows: int, num_heads: int, head_dim: int, offset: int) -> None:
    assert_right(device, head_norm_case(num_rows, num_heads, head_dim, offset))


@pytest.mark.cuda
@pytest.mark.parametrize(("num_columns", "head_dim"), [(96, 64), (514, 257)])
def test_columns_that_are_not_whole_heads_are_refused(device: Device, num_columns: int, head_dim: int) -> None:
    import cupy

    x, weight = cupy.zeros((2, num_columns), np.float32), cupy.zeros(head_dim, np.float32)
    with pytest.raises(ValueError, match="head_norm: x has"):
        head_norm(device, x=x, weight=weight, eps=EPS)


def test_cost_counts_every_byte_once() -> None:
    cost = head_norm_cost(num_rows=3, num_heads=2, head_dim=8)
    assert (cost.read_bytes, cost.written_bytes) == ((3 * 2 * 8 + 8) * 4, 3 * 2 * 8 * 4)
