"""rotary against float64: queries and keys in place, everything else untouched."""

import attention_reference as reference
import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_host

from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.rotary import rotary, rotary_cost

F32 = np.dtype(np.float32)


def run(device: Device, qkv: np.ndarray, layout: QkvLayout, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    import cupy

    fence = fenced(qkv.shape, F32)
    fence.array[...] = cupy.asarray(qkv)
    rotary(
        device,
        qkv=fence.array[:, : layout.width],
        layout=layout,
        positions=cupy.asarray(positions),
        cos_sin=cupy.asarray(table),
    )
    device.synchronize()
    fence.check()
    return to_host(fence.array)


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (32, 8)])
def test_against_float64(device: Device, head_dim: int, num_heads: int, num_key_value_heads: int) -> None:
    layout = QkvLayout(num_heads, num_key_value_heads, head_dim)
    generator = np.random.default_rng(head_dim)
    positions = np.array([0, 1, 2, 3, 511, 77, 511], np.int32)
    table = reference.cos_sin_table(512, head_dim)
    qkv = generator.normal(size=(len(positions), layout.width + 4)).astype(np.float32)
    qkv[2] = 0.0
    qkv[3, 1] = 1e4
    actual = run(device, qkv, layout, positions, table)
    for first, size in ((0, layout.q_size), (layout.k_offset, layout.kv_size)):
        heads = qkv[:, first : first + size].reshape(len(positions), -1, head_dim)
        expected = reference.rotate(reference.exact(heads), table, positions)
        assert_within(actual[:, first : first + size].reshape(heads.shape), expected.value, expected.error)
        actual[:, first : first + size] = qkv[:, first : first + size]
    np.testing.assert_array_equal(actual, qkv)  # values, padding and the columns behind the row


@pytest.mark.cuda
def test_runs_are_equal(device: Device) -> None:
    layout = QkvLayout(4, 2, 64)
    qkv = np.random.default_rng(0).normal(size=(50, layout.width)).astype(np.float32)
    positions, table = np.arange(50, dtype=np.int32), reference.cos_sin_table(50, 64)
    assert_same_bits(lambda: run(device, qkv, layout, positions, table))


def test_reference_turns_by_the_angle() -> None:
    x = np.zeros((1, 1, 8))
    x[0, 0, 1] = 1.0  # pairs with dimension 5
    table = reference.cos_sin_table(4, 8)
    turned = reference.rotate(reference.exact(x), table, np.array([3])).value[0, 0]
    angle = 3 * 10000.0**-0.25
    np.testing.assert_allclose(turned[[1, 5]], [np.cos(angle), np.sin(angle)], rtol=1e-6)
    assert not turned[[0, 2, 3, 4, 6, 7]].any()


def test_cost() -> None:
    assert rotary_cost(10, QkvLayout(4, 2, 64)).read_bytes == 10 * 6 * 64 * 4
