"""Plans of regions and the arrays that replace them, in host memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from llmcli.kernels.tiles import tile_layout
from llmcli.runners.cuda.plan.regions import BYTE, FLOAT32, INT32, Region, TiledRegion, held_bytes, lay_out


@dataclass(frozen=True)
class Inner:
    name: str
    values: Any
    absent: Any = None


@dataclass(frozen=True)
class Plan:
    first: Any
    inner: Inner
    several: tuple[Any, ...]
    matrix: Any
    number: int = 7


INNER = Inner("bias", Region((3, 5), FLOAT32))
PLAN = Plan(
    first=Region((2,), INT32),
    inner=INNER,
    several=(Region((300,), BYTE), Inner("other", Region((1,), np.dtype(np.float64)))),
    matrix=TiledRegion(tile_layout("float16", 20, 40)),
)


def memory(num_bytes: int) -> np.ndarray:
    return np.full(num_bytes, 0xA5, np.uint8)


def test_arrays_follow_each_other_in_the_order_of_the_fields() -> None:
    found = lay_out(PLAN, whole := memory(256 + 256 + 512 + 256 + 8192))
    arrays = (found.first, found.inner.values, *(found.several[0], found.several[1].values), found.matrix.tiles)
    begins = [array.ctypes.data - whole.ctypes.data for array in arrays]
    assert begins == [0, 256, 512, 1024, 1280]
    assert [(array.shape, array.dtype) for array in arrays[:4]] == [
        ((2,), np.int32),
        ((3, 5), np.float32),
        ((300,), np.uint8),
        ((1,), np.float64),
    ]
    assert arrays[4].shape == (2, 4, 1024)
    assert held_bytes(PLAN) == whole.size


def test_all_else_stays_as_it_is() -> None:
    found = lay_out(PLAN, memory(held_bytes(PLAN)))
    assert (type(found), found.number, found.inner.name, found.inner.absent) == (Plan, 7, "bias", None)
    assert found.matrix.layout is PLAN.matrix.layout
    assert PLAN.inner is INNER
    bare = Inner("nothing", None)
    assert lay_out(bare, memory(0)) is bare


def test_two_plans_may_share_a_memory() -> None:
    whole = memory(1024)
    first, second = (lay_out(Inner(name, Region((256,), FLOAT32)), whole) for name in "ab")
    first.values[:] = 1.5
    assert (second.values == 1.5).all()


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="9472 bytes do not fit a memory of 9471"):
        lay_out(PLAN, memory(held_bytes(PLAN) - 1))
