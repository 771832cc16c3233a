"""swiglu against float64: the tiles of gate and up, both row scales, gates whose exponential over- or underflows."""

from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_float64
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.lab.cases.elementwise import swiglu_case, swiglu_of
from llmcli.lab.matrices import STORAGE
from llmcli.lab.problems.activations import interleave
from llmcli.lab.row_kernels import swiglu, swiglu_cost
from llmcli.lab.rows import COLUMNS


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 0), (5, 3)])
@pytest.mark.parametrize("num_columns", [*COLUMNS, 28672])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, dtype: Any) -> None:
    assert_right(device, swiglu_case(num_rows, num_columns, extra, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
def test_gates_of_every_magnitude(device: Device, dtype: Any) -> None:
    import cupy

    gate = np.array([[-1e30, -200, -104, -89, -87.5, -20, -1, -0.0, 0, 1e-30, 1, 20, 88, 200, 1e4, 3e4]], np.float32)
    up = np.ones_like(gate)
    out, out_scale = fenced(gate.shape, dtype), fenced((1,), np.float32)
    ones = cupy.ones(1, dtype=np.float32)
    swiglu(
        device,
        gate_up=cupy.asarray(interleave(gate, up, np.nan)),
        row_scale=ones,
        out=out.array,
        out_scale=out_scale.array,
    )
    values, wide = to_float64(out.array), gate.astype(np.float64)
    expected = swiglu_of(wide, 1.0)
    bound = np.abs(expected) * (2.0**-8 if dtype == np.uint16 else 2.0**-11) + 2.0**-24
    assert np.all(np.abs(values - expected) <= bound)


def test_cost_counts_every_byte_once() -> None:
    cost = swiglu_cost(num_rows=3, num_columns=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == (3 * (2 * 8 + 1) * 4, 3 * 8 * 2 + 3 * 4)
