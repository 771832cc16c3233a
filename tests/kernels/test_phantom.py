"""Phantoms are compared with NumPy's arrays: equal after every operation, address for address."""

import random
from typing import Any

import numpy as np
import pytest

from llmcli.kernels.arguments import check
from llmcli.kernels.launches import Offset, addresses_of
from llmcli.kernels.phantom import Phantom, assumed_values

START = 1 << 20


def pair(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, Phantom]:
    return np.zeros(shape, dtype), Phantom(shape, dtype, START)


def check_alike(array: np.ndarray, phantom: Phantom, base: np.ndarray) -> None:
    assert (phantom.shape, phantom.dtype, phantom.nbytes, phantom.size) == (
        array.shape, array.dtype, array.nbytes, array.size,
    )  # fmt: skip
    if array.shape:
        assert len(phantom) == len(array)
    if array.size:
        # From one element to the next; an axis of one element has no next.
        axes = [axis for axis, size in enumerate(array.shape) if size > 1]
        assert [phantom.strides[axis] for axis in axes] == [array.strides[axis] for axis in axes]
        assert phantom.data.ptr - START == array.ctypes.data - base.ctypes.data


def random_index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    def one(size: int) -> Any:
        ends = [None, *range(-size - 2, size + 3)]
        if draw.random() < 0.3:
            return draw.randrange(-size, size)
        return slice(draw.choice(ends), draw.choice(ends), draw.choice([None, 1, 2, 3, -1, -2]))

    index = [one(size) for size in shape[: draw.randint(1, len(shape))]]
    if draw.random() < 0.2:
        index = [..., *(one(size) for size in shape[len(shape) - len(index) :])]
    return tuple(index) if len(index) > 1 or draw.random() < 0.5 else index[0]


def random_step(draw: random.Random, array: np.ndarray, phantom: Phantom) -> tuple[np.ndarray, Phantom]:
    kind = draw.choice(["index", "index", "reshape", "view"])
    if kind == "index" and array.ndim and 0 not in array.shape:
        index = random_index(draw, array.shape)
        return array[index], phantom[index]
    if kind == "reshape" and array.flags.c_contiguous and array.size:
        divisor = draw.choice([one for one in range(1, array.size + 1) if array.size % one == 0])
        shape = draw.choice([(divisor, -1), (-1, divisor), (1, divisor, array.size // divisor)])
        return array.reshape(shape), phantom.reshape(*shape) if draw.random() < 0.5 else phantom.reshape(shape)
    if kind == "view":
        dtype = draw.choice([np.uint8, np.uint16, np.float32, np.int32, np.float64])
        try:
            expected = array.view(dtype)
        except (ValueError, TypeError):
            with pytest.raises(ValueError, match="cannot be seen as"):
                phantom.view(dtype)
            return array, phantom
        return expected, phantom.view(dtype)
    return array, phantom


@pytest.mark.parametrize("seed", range(200))
def test_slices_reshapes_and_views_are_numpys(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
        base, phantom = pair(shape, draw.choice([np.uint8, np.float16, np.float32]))
        array: Any = base
        check_alike(array, phantom, base)
        for _ in range(5):
            array, phantom = random_step(draw, array, phantom)
            if not isinstance(array, np.ndarray):  # an element, which NumPy copies
                assert (phantom.shape, phantom.strides, phantom.size) == ((), (), 1)
                break
            check_alike(array, phantom, base)
            if array.size == 0:
                break


def test_what_numpy_refuses_or_would_copy() -> None:
    _, phantom = pair((4, 6), np.float32)
    for index in (4, -5, (0, 6), (0, 0, 0)):
        with pytest.raises(IndexError):
            phantom[index]
    for shape in ((5, 5), (-1, 7), (-1, -1), (-4, -6)):
        with pytest.raises(ValueError, match="do not make"):
            phantom.reshape(*shape)
    with pytest.raises(ValueError, match="without a copy"):
        phantom[:, :3].reshape(12)
    assert phantom[:1, :3].reshape(3).strides == (4,)


def test_launchers_take_phantoms() -> None:
    _, phantom = pair((4, 6), np.float32)
    check("kernel", "x", phantom[:, :3], dtype=np.float32, shape=(None, 3), row_stride=True)
    with pytest.raises(ValueError, match="not aligned"):
        check("kernel", "x", phantom[0, 1:], dtype=np.float32)
    assert addresses_of((phantom[1], Offset(phantom, 8), None)) == [START + 24, START + 8]


def test_assumed_values_go_with_slices() -> None:
    assert assumed_values(Phantom((8,), np.int32, START, assumed=41)[:3]) == [41, 41, 41]
    values = np.arange(12).reshape(3, 4)
    positions = Phantom((3, 4), np.int32, START, assumed=values)
    assert assumed_values(positions[1:, ::2]) == [4, 6, 8, 10]
    assert assumed_values(positions.reshape(2, 6)[1]) == [6, 7, 8, 9, 10, 11]
    assert assumed_values(positions[0, 3]) == [3]
    for unknown in (Phantom((8,), np.int32, START), positions.view(np.uint8), np.zeros(3, np.int32)):
        with pytest.raises(TypeError, match="a dry run must assume them"):
            assumed_values(unknown)
