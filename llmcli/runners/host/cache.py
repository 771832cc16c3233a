"""`PagedCache`: keys and values in pages, in arrays of numpy or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import PAGE_TOKENS, pages_of

Array = Any
# Head vectors [..., head_dim] as codes int8, their shape, and scales float32 [...]: codes * scale is the vector.
Quantize = Callable[[Array], tuple[Array, Array]]
# Entries of the second dimension by their numbers, int64.
Take = Callable[[Array, Any], Array]


def cache_shape(config: LlamaConfig, num_pages: int) -> tuple[int, ...]:
    """The shape of keys and of values."""
    return config.num_hidden_layers, config.num_key_value_heads, num_pages, PAGE_TOKENS, config.head_dim


class PagedCache:
    """Keys (already rotated) and values of all rows.

    A token takes part in attention as it is stored, also in the step that adds it.
    Shapes: keys, values [num_hidden_layers, num_key_value_heads, num_pages, PAGE_TOKENS, head_dim]; with `quantize`
            they are codes, and there are scales of both float32 [..., PAGE_TOKENS]
    """

    def __init__(
        self, keys: Array, values: Array, take: Take, scales: Sequence[Array] = (), quantize: Quantize | None = None
    ):
        self.arrays = (keys, values, *scales)
        self.take = take
        self.quantize = quantize

    def row(self, pages: Sequence[int]) -> RowCache:
        """The tokens that lie in these pages, one after the other."""
        return RowCache(self, pages)

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds to another one."""
        for array in self.arrays:
            array[:, :, target] = array[:, :, source]


class RowCache:
    """One row's part of a cache. Where its pages follow one another, which is usual, they are read in place.

    Attributes: pages: their numbers, int64
    """

    def __init__(self, cache: PagedCache, pages: Sequence[int]):
        self._cache = cache
        first = pages[0]
        self._first = first if list(pages) == list(range(first, first + len(pages))) else None
        self.pages = np.array(pages, np.int64)

    def layer(self, layer: int) -> tuple[Array, Array]:
        """Keys and values of all rows. Shapes: each [num_key_value_heads, num_pages, PAGE_TOKENS, head_dim]"""
        keys, values, *_ = self._cache.arrays
        return keys[layer], values[layer]

    def append(self, layer: int, position: int, key: Array, value: Array) -> None:
        """Store a layer's keys and values of tokens. Shapes: key, value [num_tokens, num_key_value_heads, head_dim]."""
        new = [key.swapaxes(0, 1), value.swapaxes(0, 1)]
        if self._cache.quantize is not None:
            codes, scales = zip(*map(self._cache.quantize, new), strict=True)
            new = [*codes, *scales]
        for array, of_tokens in zip(self._cache.arrays, new, strict=True):
            self._store(array[layer], position, of_tokens)

    def _store(self, array: Array, position: int, new: Array) -> None:
        """Shapes: array [num_key_value_heads, num_pages, PAGE_TOKENS, ...]; new [num_key_value_heads, n, ...]"""
        num_tokens = new.shape[1]
        if self._first is not None:
            self._tokens(array, position, position + num_tokens)[:] = new
            return
        begin = 0
        while begin < num_tokens:
            page, within = divmod(position + begin, PAGE_TOKENS)
            end = min(begin + PAGE_TOKENS - within, num_tokens)
            array[:, int(self.pages[page]), within : within + end - begin] = new[:, begin:end]
            begin = end

    def seen(self, layer: int, begin: int, end: int) -> Sequence[Array]:
        """Keys and values of the tokens begin ... end - 1; codes are widened to float32.

        Shapes: each [num_key_value_heads, end - begin, head_dim]
        """
        keys, values, *scales = (self._tokens(array[layer], begin, end) for array in self._cache.arrays)
        if not scales:
            return keys, values
        return [codes * scale[..., None] for codes, scale in zip((keys, values), scales, strict=True)]

    def _tokens(self, array: Array, begin: int, end: int) -> Array:
        """Shapes: array [num_key_value_heads, num_pages, PAGE_TOKENS, ...]; result [num_key_value_heads, n, ...]"""
        if self._first is None:
            skipped = begin // PAGE_TOKENS
            array = self._cache.take(array, self.pages[skipped : pages_of(end)])
        else:
            skipped = -self._first
        begin, end = begin - skipped * PAGE_TOKENS, end - skipped * PAGE_TOKENS
        return array.reshape(len(array), -1, *array.shape[3:])[:, begin:end]
