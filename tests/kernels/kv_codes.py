"""A layer's KV cache for the tests of kernels: floats as they are stored, or 8-bit codes with scales; and its pages."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from fenced import Fenced, fenced, to_float64, to_host

from llmcli.kernels.qkv import PAGE_TOKENS
from llmcli.lab.storage import to_storage

CODES = np.dtype(np.uint8)
NO_PAGE = 2**30  # reading there ends the test
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


def page_table(num_rows: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Room for `num_tokens` a row, in no order and with holes. Shapes: result int32 [num_rows, pages_per_row]."""
    pages_per_row = -(-num_tokens // PAGE_TOKENS)
    pages = np.random.default_rng(seed).permutation(num_rows * pages_per_row + 3)
    return pages[: num_rows * pages_per_row].reshape(num_rows, pages_per_row).astype(np.int32)


def share_pages(cache: Stored, table: np.ndarray, rows: list[int], num_pages: int) -> None:
    """Let all `rows` begin with the first row's tokens, in the same pages."""
    shared = slice(0, num_pages * PAGE_TOKENS)
    for row in rows[1:]:
        cache[row, :, shared] = cache[rows[0], :, shared]
        table[row, :num_pages] = table[rows[0], :num_pages]


def visible_table(table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same with no page where no token up to a row's last position lies."""
    visible = np.full_like(table, NO_PAGE)
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        if row >= 0:
            num_pages = position // PAGE_TOKENS + 1
            visible[row, :num_pages] = table[row, :num_pages]
    return visible


def paged(cache: Stored, table: np.ndarray) -> Stored:
    """Rows [num_rows, num_key_value_heads, seq_len, head_dim] as pages; what holds no token is poisoned."""
    _, num_heads, seq_len, head_dim = cache.elements.shape
    shape = (int(table.max()) + 4, num_heads, PAGE_TOKENS, head_dim)
    pages = Stored(np.zeros(shape, cache.dtype), None if cache.scales is None else np.zeros(shape[:3], np.float32))
    pages.poison((slice(None),))
    for row, index in np.ndindex(table.shape):
        tokens = cache[row, :, index * PAGE_TOKENS : min((index + 1) * PAGE_TOKENS, seq_len)]
        pages[table[row, index], :, : tokens.elements.shape[1]] = tokens
    return pages


def in_rows(pages: Stored, table: np.ndarray, seq_len: int) -> Stored:
    """The inverse. Shapes: pages [num_pages, num_key_value_heads, PAGE_TOKENS, head_dim]."""

    def gather(array: np.ndarray) -> np.ndarray:
        by_row = np.moveaxis(array[table], 2, 1)  # [num_rows, num_key_value_heads, pages_per_row, PAGE_TOKENS, ...]
        return np.ascontiguousarray(by_row.reshape(*by_row.shape[:2], -1, *by_row.shape[4:])[:, :, :seq_len])

    return Stored(gather(pages.elements), None if pages.scales is None else gather(pages.scales))


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
