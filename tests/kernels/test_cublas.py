"""The matrix library's product against float64; no TF32 in it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, assert_within, fenced, to_float64

from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.lab.matrices import to_storage
from llmcli.lab.rows import sum_bound


@pytest.fixture
def cublas(device: Device) -> Iterator[Cublas]:
    library = Cublas(device)
    yield library
    device.synchronize()


def operands(num_tokens: int, num_rows: int, num_inputs: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_inputs)
    return (
        to_storage(rng.standard_normal((num_tokens, num_inputs)), dtype),
        to_storage(rng.standard_normal((num_rows, num_inputs)), dtype),
    )


@pytest.mark.cuda
@pytest.mark.parametrize(("num_tokens", "num_rows", "num_inputs"), [(1, 16, 40), (33, 48, 176), (200, 512, 4096)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_products(device: Device, cublas: Cublas, num_tokens: int, num_rows: int, num_inputs: int, dtype: Any) -> None:
    """The bound of float32 sums would not hold with TF32, nor with partial sums in float16."""
    import cupy

    x, weight = operands(num_tokens, num_rows, num_inputs, dtype)
    result = fenced((num_tokens, num_rows + 16), np.float32)
    cublas.matmul(x=cupy.asarray(x), weight=cupy.asarray(weight), out=result.array[:, :num_rows])
    device.synchronize()
    result.check()
    reference = to_float64(x) @ to_float64(weight).T
    magnitude = np.abs(to_float64(x)) @ np.abs(to_float64(weight)).T
    assert_within(result.array[:, :num_rows], reference, sum_bound(reference, magnitude, num_inputs, np.float32))
    assert np.isnan(to_float64(result.array[:, num_rows:])).all()


@pytest.mark.cuda
def test_products_of_codes_are_exact(device: Device, cublas: Cublas) -> None:
    import cupy

    rng = np.random.default_rng(1)
    x, weight = (rng.integers(-127, 128, size=shape, dtype=np.int8) for shape in ((33, 176), (48, 176)))
    result = fenced((33, 48), np.int32)
    cublas.matmul(x=cupy.asarray(x), weight=cupy.asarray(weight), out=result.array)
    device.synchronize()
    result.check()
    assert np.array_equal(result.array.get(), x.astype(np.int32) @ weight.T.astype(np.int32))


@pytest.mark.cuda
@pytest.mark.whole_card
def test_later_calls_take_no_memory_and_repeat_their_bits(device: Device, cublas: Cublas) -> None:
    import cupy

    x, weight = (cupy.asarray(array) for array in operands(512, 1024, 4096, np.float16))
    out = cupy.empty((512, 1024), dtype=np.float32)
    cublas.matmul(x=x, weight=weight, out=out)
    device.synchronize()
    free = cupy.cuda.runtime.memGetInfo()[0]

    def run() -> Any:
        cublas.matmul(x=x, weight=weight, out=out)
        device.synchronize()
        return out

    assert_same_bits(run)
    assert cupy.cuda.runtime.memGetInfo()[0] == free


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device, cublas: Cublas) -> None:
    import cupy

    x, weight, out = (cupy.zeros(shape, dtype=np.float32) for shape in ((2, 64), (16, 64), (2, 16)))
    with pytest.raises(ValueError, match="cublas: weight is float16, expected float32"):
        cublas.matmul(x=x, weight=weight.astype(np.float16), out=out)
    with pytest.raises(ValueError, match=r"cublas: out is \[2, 8\]"):
        cublas.matmul(x=x, weight=weight, out=out[:, :8])
