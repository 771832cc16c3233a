"""Outputs between canaries and error bounds from the theory: the basis of every kernel test.

The arrays are CuPy's on a card; `backend=numpy` gives the same on the host, where these helpers are tested.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FENCE_BYTES = 512  # on each side; a multiple of every vector width
_CANARY = 0xA5
_POISON = 0xFF  # NaN in float32, float16 and bfloat16; -1 in signed integers


@dataclass(frozen=True)
class Fenced:
    """An array full of NaN (0xFF bytes) with canaries on both sides."""

    array: Any
    memory: Any

    def check(self) -> None:
        """Fail if a byte outside the array was written."""
        inside = FENCE_BYTES + self.array.nbytes
        for side, fence in (("before", self.memory[:FENCE_BYTES]), ("after", self.memory[inside:])):
            written = np.flatnonzero(to_host(fence) != _CANARY)
            assert written.size == 0, (
                f"{written.size} bytes written {side} the array, the nearest "
                f"{FENCE_BYTES - written.max() if side == 'before' else written.min() + 1} bytes from it"
            )


def fenced(shape: int | tuple[int, ...], dtype: Any, backend: Any = None) -> Fenced:
    """A poisoned array of this shape and type between canaries."""
    module = backend if backend is not None else _cupy()
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = module.full(size + 2 * FENCE_BYTES, _CANARY, dtype=np.uint8)
    memory[FENCE_BYTES : FENCE_BYTES + size] = _POISON
    return Fenced(memory[FENCE_BYTES : FENCE_BYTES + size].view(dtype).reshape(shape), memory)


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy of an array of either kind."""
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def to_float64(array: Any) -> np.ndarray:
    """The exact values of a float32, float16 or bfloat16 (uint16) array."""
    host = to_host(array)
    if host.dtype == np.uint16:
        host = (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float64)


def assert_within(actual: Any, reference: np.ndarray, bound: np.ndarray | float) -> None:
    """Fail unless every element is a number within `bound` of the float64 reference."""
    assert reference.dtype == np.float64, "the reference must be computed in float64"
    values = to_float64(actual)
    assert values.shape == reference.shape, f"shape {values.shape}, expected {reference.shape}"
    bound = np.broadcast_to(bound, reference.shape)
    error = np.abs(values - reference)
    bad = ~(error <= bound)  # also true for NaN
    if bad.any():
        ratio = np.where(np.isnan(error), np.inf, error / np.maximum(bound, np.finfo(np.float64).tiny))
        worst = np.unravel_index(np.argmax(ratio), ratio.shape)
        place = ", ".join(map(str, worst))
        raise AssertionError(
            f"{bad.sum()} of {bad.size} elements are out of bounds; worst at [{place}]: {values[worst]!r}, expected "
            f"{reference[worst]!r} within {bound[worst]:.3g} (error {error[worst]:.3g})"
        )


def assert_same_bits(call: Callable[[], Any]) -> None:
    """Fail unless two runs of `call`, which returns one array or several, give the same bytes."""
    first, second = (_copies(call()) for _ in range(2))
    assert len(first) == len(second)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        differing = np.count_nonzero(one.view(np.uint8) != other.view(np.uint8))
        assert differing == 0, f"array {number}: {differing} bytes differ between two runs"


def assert_launches_agree(launch: Callable[[Any], None], expected: np.ndarray, num_launches: int) -> None:
    """Fail unless each `launch(out)` of many in sequence gives the bits of `expected`.

    A kernel with a race is right most times, and always with few blocks: use a whole product.
    """
    cupy = _cupy()
    bits = cupy.asarray(expected).view(np.uint32)
    differing = cupy.zeros(num_launches, dtype=np.int64)
    for number in range(num_launches):
        out = cupy.full(expected.shape, np.nan, dtype=np.float32)
        launch(out)
        differing[number] = (out.view(np.uint32) != bits).sum()
    wrong = np.flatnonzero(to_host(differing))
    assert wrong.size == 0, f"{wrong.size} of {num_launches} launches differ, the first in {differing[wrong[0]]} values"


def _copies(result: Any) -> list[np.ndarray]:
    arrays = result if isinstance(result, tuple | list) else (result,)
    return [np.ascontiguousarray(to_host(array)).reshape(-1) for array in arrays]


def _cupy() -> Any:
    import cupy

    return cupy
