"""swiglu against float64: the tiles of gate and up, both row scales, gates whose exponential over- or underflows."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced, to_float64
from row_data import COLUMNS, EPSILON, STORAGE, assert_rounded, make_rows, powers_of_two, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.swiglu import swiglu, swiglu_cost


def interleave(gate: np.ndarray, up: np.ndarray, extra: int = 0) -> np.ndarray:
    """Eight columns of gate, eight of up, and so on; what pads the last tile is NaN, and so are `extra` columns."""
    num_rows, num_columns = gate.shape
    padded = -(-num_columns // 8) * 8
    tiles = np.full((2, num_rows, padded), np.nan, np.float32)
    tiles[0, :, :num_columns], tiles[1, :, :num_columns] = gate, up
    joined = tiles.reshape(2, num_rows, -1, 8).transpose(1, 2, 0, 3).reshape(num_rows, 2 * padded)
    return np.concatenate([joined, np.full((num_rows, extra), np.nan, np.float32)], axis=1)


def reference_of(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("num_rows", "extra"), [(1, 0), (6, 16), (33, 0), (5, 3)])
@pytest.mark.parametrize("num_columns", [*COLUMNS, 28672])
def test_rows(device: Device, num_columns: int, num_rows: int, extra: int, dtype: Any) -> None:
    import cupy

    up = make_rows(num_rows, num_columns)
    gate = np.random.default_rng(num_columns).normal(scale=4, size=up.shape).astype(np.float32)
    gate[0, :: max(1, num_columns // 5)] = -80
    scale = powers_of_two(num_rows)
    gate_up, row_scale = cupy.asarray(interleave(gate, up, extra)), cupy.asarray(scale)
    out, out_scale = fenced(up.shape, dtype), fenced((num_rows,), np.float32)

    def call() -> tuple[Any, Any]:
        swiglu(device, gate_up=gate_up, row_scale=row_scale, out=out.array, out_scale=out_scale.array)
        return out.array, out_scale.array

    with unchanged(gate_up, row_scale):
        assert_same_bits(call)
    out.check()
    out_scale.check()
    gate64, up64 = (values.astype(np.float64) * scale[:, None] for values in (gate, up))
    # exp: 1 ulp, or __expf's 2 + 1.173 |g|; an ulp is 2 roundings. Sum, quotient (2 ulp), two products: 7 more.
    exponential = 2 if dtype == np.float32 else 2 * (2 + 1.173 * np.abs(gate64))
    # Below -87, where it is less than 2^-118, silu may be 0.
    lost = np.where(gate64 < -87, 2.0**-118, 0.0) * np.abs(up64)
    reference = reference_of(gate64, up64)
    assert_rounded(out.array, out_scale.array, reference, (exponential + 7) * EPSILON, lost)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
def test_gates_of_every_magnitude(device: Device, dtype: Any) -> None:
    import cupy

    gate = np.array([[-1e30, -200, -104, -89, -87.5, -20, -1, -0.0, 0, 1e-30, 1, 20, 88, 200, 1e4, 3e4]], np.float32)
    up = np.ones_like(gate)
    out, out_scale = fenced(gate.shape, dtype), fenced((1,), np.float32)
    ones = cupy.ones(1, dtype=np.float32)
    swiglu(device, gate_up=cupy.asarray(interleave(gate, up)), row_scale=ones, out=out.array, out_scale=out_scale.array)
    values, wide = to_float64(out.array), gate.astype(np.float64)
    expected = reference_of(wide, 1.0)
    bound = np.abs(expected) * (2.0**-8 if dtype == np.uint16 else 2.0**-11) + 2.0**-24
    assert np.all(np.abs(values - expected) <= bound)


def test_cost_counts_every_byte_once() -> None:
    cost = swiglu_cost(num_rows=3, num_columns=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == (3 * (2 * 8 + 1) * 4, 3 * 8 * 2 + 3 * 4)
