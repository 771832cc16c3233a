"""A layer's KV cache for the tests of kernels: floats as they are stored, or 8-bit codes with scales."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from fenced import Fenced, fenced, to_float64, to_host, to_storage

CODES = np.dtype(np.uint8)
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Stored:
    """Vectors as a cache holds them. Shapes: elements [..., head_dim]; scales float32 [...] beside codes, else None."""

    elements: np.ndarray
    scales: np.ndarray | None

    @property
    def dtype(self) -> np.dtype:
        return self.elements.dtype

    @property
    def values(self) -> np.ndarray:
        """What is stood for, exactly, in float64."""
        if self.scales is None:
            return to_float64(self.elements)
        return (self.elements.astype(np.float64) - 128) * self.scales[..., None].astype(np.float64)

    def __getitem__(self, place: Place) -> "Stored":
        return Stored(self.elements[place], None if self.scales is None else self.scales[place])

    def __setitem__(self, place: Place, other: "Stored") -> None:
        self.elements[place] = other.elements
        if self.scales is not None:
            self.scales[place] = other.scales

    def copy(self) -> "Stored":
        return Stored(self.elements.copy(), None if self.scales is None else self.scales.copy())

    def poison(self, place: Place) -> None:
        """Put NaN where nobody may look, of codes in the scales."""
        self.elements[place].view(np.uint8)[...] = 0xFF
        if self.scales is not None:
            self.scales[place].view(np.uint8)[...] = 0xFF

    def tobytes(self) -> bytes:
        return self.elements.tobytes() + (b"" if self.scales is None else self.scales.tobytes())


def stored(x: np.ndarray, dtype: np.dtype) -> Stored:
    """Round vectors as the cache does: codes in float32, one operation at a time."""
    if dtype != CODES:
        return Stored(to_storage(x, dtype), None)
    cut = np.clip(x.astype(np.float32), np.float32(-65504), np.float32(65504))
    scales = np.abs(cut).max(-1) / np.float32(127)
    codes = np.rint(cut / np.where(scales == 0, np.float32(1), scales)[..., None])
    return Stored((np.clip(codes, -127, 127) + 128).astype(np.uint8), scales)


@dataclass(frozen=True)
class FencedCache:
    """A cache on the card between canaries, as the second of two layers: its codes need not be aligned to 16 bytes."""

    elements: Fenced
    scales: Fenced | None

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Elements and scales for a launcher."""
        return self.elements.array[1], None if self.scales is None else self.scales.array[1]

    def check(self) -> None:
        for fence in filter(None, (self.elements, self.scales)):
            fence.check()
            first_layer = to_host(fence.array[0])
            assert (first_layer.view(np.uint8) == 0xFF).all(), "the layer in front was written to"

    def download(self) -> Stored:
        return Stored(*(None if array is None else to_host(array) for array in self.arrays))


def fenced_cache(shape: tuple[int, ...], dtype: np.dtype) -> FencedCache:
    """A poisoned cache. Shapes: shape [num_rows, num_key_value_heads, max_seq_len, head_dim]."""
    return FencedCache(fenced((2, *shape), dtype), fenced((2, *shape[:3]), np.float32) if dtype == CODES else None)


def upload_cache(cache: Stored) -> FencedCache:
    """What `cache` holds, on the card."""
    import cupy

    fences = fenced_cache(cache.elements.shape, cache.dtype)
    for array, source in zip(fences.arrays, (cache.elements, cache.scales), strict=True):
        if array is not None:
            array[...] = cupy.asarray(source)
    return fences


def cache_arguments(keys: FencedCache, values: FencedCache) -> dict[str, Any]:
    """Keys and values as the launchers name them."""
    (key_elements, key_scales), (value_elements, value_scales) = keys.arrays, values.arrays
    return {
        "keys": key_elements,
        "values": value_elements,
        "key_scales": key_scales,
        "value_scales": value_scales,
    }
