"""Regions: arrays that are planned before any memory is taken; and dataclasses of them, laid out in one memory.

A plan is a dataclass whose fields are regions, tuples of regions, or other plans. `lay_out` returns the same dataclass
with an array in place of every region; all other fields stay. So a plan and its arrays on the card have one type and
one set of names: `Workspace[Region]` becomes `Workspace[Any]`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from llmcli.kernels.tiles import TileLayout, aligned

# Types by their names in config.json and for users; the card's arrays hold bfloat16 as uint16, int8 as codes + 128.
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
}
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8"}

FLOAT32, INT32, UINT32, BYTE = (np.dtype(kind) for kind in (np.float32, np.int32, np.uint32, np.uint8))


@dataclass(frozen=True)
class Region:
    """A planned array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """The array's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Its bytes, rounded up so that the next region is aligned too."""
        return aligned(self.num_bytes)

    def place(self, memory: Any) -> Any:
        """The array over the first bytes of `memory`, a uint8 array of CuPy or NumPy."""
        return memory[: self.num_bytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class TiledRegion:
    """A planned matrix in tiles; placed, it is a `TiledMatrix`."""

    layout: TileLayout

    @property
    def held_bytes(self) -> int:
        """Bytes of its arrays, each rounded up."""
        return self.layout.arena_bytes

    def place(self, memory: Any) -> Any:
        """The matrix over the first bytes of `memory`, a uint8 array of CuPy or NumPy."""
        return self.layout.place(memory)


def held_bytes(plan: Any) -> int:
    """Bytes of a plan's regions, one after the other."""
    if isinstance(plan, (Region, TiledRegion)):
        return plan.held_bytes
    return sum(held_bytes(part) for part in _parts(plan))


def lay_out(plan: Any, memory: Any) -> Any:
    """The plan with arrays over `memory` in place of its regions. Their contents are undefined.

    Several plans may share one memory, if they are used at different times.
    Shapes: memory uint8 [at least held_bytes], its address a multiple of ALIGNMENT; a CuPy or NumPy array
    Raises: ValueError if it is too small
    """
    if held_bytes(plan) > memory.nbytes:
        raise ValueError(f"{held_bytes(plan)} bytes do not fit a memory of {memory.nbytes}")
    return _lay_out(plan, memory, 0)[0]


def _lay_out(part: Any, memory: Any, begin: int) -> tuple[Any, int]:
    """A part of a plan with arrays over `memory` from `begin` on, and where they end.

    Not a closure: one that calls itself would keep the memory until the garbage collector runs.
    """
    if isinstance(part, (Region, TiledRegion)):
        end = begin + part.held_bytes
        return part.place(memory[begin:end]), end
    if not isinstance(part, tuple) and held_bytes(part) == 0:
        return part, begin
    placed = []
    for one in part if isinstance(part, tuple) else [getattr(part, field.name) for field in fields(part)]:
        array, begin = _lay_out(one, memory, begin)
        placed.append(array)
    if isinstance(part, tuple):
        return tuple(placed), begin
    return replace(part, **{field.name: one for field, one in zip(fields(part), placed, strict=True)}), begin


def _parts(plan: Any) -> Sequence[Any]:
    if isinstance(plan, tuple):
        return plan
    # Like `fields`, in half the time: a plan of a large model has thousands of parts, and is made many times.
    return [getattr(plan, name) for name in getattr(plan, "__dataclass_fields__", ())]
