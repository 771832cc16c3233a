"""A layer's KV cache of the lab on a card, between canaries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from fenced import Fenced, fenced, to_host

from llmcli.lab.attention import CODES, Stored


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
    """A poisoned cache. Shapes: shape [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim]."""
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
