"""rotary against float64: queries in place, everything else untouched."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.rotary import rotary_cost
from llmcli.lab import attention as reference
from llmcli.lab.cases.rotary import case, odd_positions


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (32, 8)])
def test_against_float64(device: Device, head_dim: int, num_heads: int, num_key_value_heads: int) -> None:
    assert_right(device, case(QkvLayout(num_heads, num_key_value_heads, head_dim), odd_positions()))


@pytest.mark.cuda
def test_runs_are_equal(device: Device) -> None:
    assert_right(device, case(QkvLayout(4, 2, 64), np.arange(50, dtype=np.int32)))


def test_reference_turns_by_the_angle() -> None:
    x = np.zeros((1, 1, 8))
    x[0, 0, 1] = 1.0  # pairs with dimension 5
    table = reference.cos_sin_table(4, 8)
    turned = reference.rotate(reference.exact(x), table, np.array([3])).value[0, 0]
    angle = 3 * 10000.0**-0.25
    np.testing.assert_allclose(turned[[1, 5]], [np.cos(angle), np.sin(angle)], rtol=1e-6)
    assert not turned[[0, 2, 3, 4, 6, 7]].any()


def test_cost() -> None:
    assert rotary_cost(10, QkvLayout(4, 2, 64)).read_bytes == 10 * 4 * 64 * 4
