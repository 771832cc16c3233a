"""A layer's KV cache of the lab on a card, between canaries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from fenced import Fenced, fenced, to_host

from llmcli.kernels.attention_decode import LaneInputs
from llmcli.kernels.attention_prefill import PromptInputs
from llmcli.kernels.qkv import LayerCache
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


def layer_cache(keys: FencedCache, values: FencedCache) -> LayerCache:
    """Keys and values for a launcher."""
    (key_elements, key_scales), (value_elements, value_scales) = keys.arrays, values.arrays
    return LayerCache(key_elements, value_elements, key_scales, value_scales)


def lane_inputs(**given: Any) -> LaneInputs:
    """A launcher's inputs from flat arguments, those of the cache among them; norms and window may be left out."""
    return LaneInputs(**{"q_norm": None, "k_norm": None, "window": None, **_with_cache(given)})


def call_lane_by_lane(launcher: Any, device: Any, given: dict[str, Any]) -> None:
    """Call a launcher with flat arguments: those of its lanes and of their cache, and its own."""
    of_lanes = {*LaneInputs.__dataclass_fields__, *LayerCache.__dataclass_fields__}
    lanes = lane_inputs(**{name: value for name, value in given.items() if name in of_lanes})
    launcher(device, lanes, **{name: value for name, value in given.items() if name not in of_lanes})


def prompt_inputs(**given: Any) -> PromptInputs:
    """The same for a prompt."""
    return PromptInputs(**_with_cache(given))


def _with_cache(given: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: given.pop(name) for name in ("keys", "values", "key_scales", "value_scales") if name in given}
    return {**given, "cache": LayerCache(**arrays)} if arrays else given


def in_rows(pages: Stored, table: np.ndarray, seq_len: int) -> Stored:
    """The inverse of `paged`. Shapes: pages [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim]."""

    def gather(array: np.ndarray) -> np.ndarray:
        by_row = np.moveaxis(array[table], 2, 1)  # [num_rows, num_key_value_heads, pages_per_row, PAGE_TOKENS, ...]
        return np.ascontiguousarray(by_row.reshape(*by_row.shape[:2], -1, *by_row.shape[4:])[:, :, :seq_len])

    return Stored(gather(pages.elements), None if pages.scales is None else gather(pages.scales))
