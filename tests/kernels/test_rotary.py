"""rotary against float64: queries in place, everything else untouched."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import rotary, rotary_cost
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab import attention as reference
from llmcli.lab.cases.attention import odd_positions, rotary_case


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (32, 8)])
def test_against_float64(device: Device, head_dim: int, num_heads: int, num_key_value_heads: int) -> None:
    assert_right(device, rotary_case(QkvLayout(num_heads, num_key_value_heads, head_dim), odd_positions()))


@pytest.mark.cuda
def test_runs_are_equal(device: Device) -> None:
    assert_right(device, rotary_case(QkvLayout(4, 2, 64), np.arange(50, dtype=np.int32)))


def test_reference_turns_by_the_angle() -> None:
    x = np.zeros((1, 1, 8))
    x[0, 0, 1] = 1.0  # pairs with dimension 5
    table = reference.cos_sin_table(4, 8)
    turned = reference.rotate(reference.exact(x), table, np.array([3])).value[0, 0]
    angle = 3 * 10000.0**-0.25
    np.testing.assert_allclose(turned[[1, 5]], [np.cos(angle), np.sin(angle)], rtol=1e-6)
    assert not turned[[0, 2, 3, 4, 6, 7]].any()


def test_cost() -> None:
    assert rotary_cost(10, 4 * 64).read_bytes == 10 * 4 * 64 * 4


@pytest.mark.parametrize(
    ("width", "pairs", "stride", "message"),
    [
        (100, 32, 100, "100 columns are not whole heads of 64"),
        (128, 6, 128, "head_dim is 12, expected a multiple of 8"),
        (128, 32, 130, "rows of x are 130 columns apart, expected a multiple of 4"),
    ],
)
def test_refused_heads(width: int, pairs: int, stride: int, message: str) -> None:
    def array(shape: tuple[int, ...], dtype: type, row_stride: int | None = None) -> Any:
        like = np.empty(shape, dtype)
        strides = like.strides if row_stride is None else (4 * row_stride, 4)
        return SimpleNamespace(dtype=like.dtype, shape=shape, strides=strides, data=SimpleNamespace(ptr=4096))

    device: Any = None
    with pytest.raises(ValueError, match=f"rotary: {message}"):
        rotary(
            device,
            x=array((5, width), np.float32, stride),
            positions=array((5,), np.int32),
            cos_sin=array((9, pairs, 2), np.float32),
        )
