"""A layer's KV cache for cases of kernels: floats as they are stored, or 8-bit codes with scales; and its pages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.qkv import PAGE_TOKENS
from llmcli.lab.problem import stored_values
from llmcli.lab.storage import storage_name, to_storage

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
        """The type of the elements."""
        return self.elements.dtype

    @property
    def values(self) -> np.ndarray:
        """What is stood for, exactly, in float64."""
        if self.scales is None:
            return stored_values(self.elements)
        return (self.elements.astype(np.float64) - 128) * self.scales[..., None].astype(np.float64)

    def __getitem__(self, place: Place) -> "Stored":
        return Stored(self.elements[place], None if self.scales is None else self.scales[place])

    def __setitem__(self, place: Place, other: "Stored") -> None:
        self.elements[place] = other.elements
        if self.scales is not None:
            self.scales[place] = other.scales

    def copy(self) -> "Stored":
        """A copy of both."""
        return Stored(self.elements.copy(), None if self.scales is None else self.scales.copy())

    def poison(self, place: Place) -> None:
        """Put NaN where nobody may look, of codes in the scales."""
        self.elements[place].view(np.uint8)[...] = 0xFF
        if self.scales is not None:
            self.scales[place].view(np.uint8)[...] = 0xFF

    def tobytes(self) -> bytes:
        """The bytes of both."""
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


def cache_name(dtype: np.dtype[Any]) -> str:
    """What the type of a cache's elements is called."""
    return "codes" if dtype == CODES else storage_name(dtype)
