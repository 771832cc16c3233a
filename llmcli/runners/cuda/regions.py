"""`Region`: an array that is to lie on the card, known by name, shape and type before any memory is taken."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 256  # bytes: what CUDA aligns allocations to, and more than any vector load asks for

# Types by the word config.json and users have for them; the card's arrays hold bfloat16 as uint16, int8 as codes + 128.
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
}
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Region:
    """A named array of the card."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def held_bytes(self) -> int:
        """Its bytes, rounded up so that the next region is aligned too."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arrays(Protocol):
    """The arrays of some regions by their names: an arena, or phantoms in its place."""

    def __getitem__(self, name: str, /) -> Any: ...


def with_offsets(regions: Iterable[Region]) -> Iterator[tuple[Region, int]]:
    """Each region with the byte at which it begins, where they lie one after the other."""
    begin = 0
    for region in regions:
        yield region, begin
        begin += region.held_bytes


def held_bytes(regions: Iterable[Region]) -> int:
    """Bytes of regions that lie one after the other."""
    return sum(region.held_bytes for region in regions)
