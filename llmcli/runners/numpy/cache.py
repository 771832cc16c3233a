"""`PagedCache`: keys and values in pages, in float32."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import PAGE_TOKENS, pages_of

Floats = npt.NDArray[np.float32]


class PagedCache:
    """Keys (already rotated) and values of all rows.

    Shapes: keys, values [num_hidden_layers, num_key_value_heads, num_pages, PAGE_TOKENS, head_dim]
    """

    def __init__(self, config: LlamaConfig, num_pages: int):
        shape = config.num_hidden_layers, config.num_key_value_heads, num_pages, PAGE_TOKENS, config.head_dim
        self._keys, self._values = (np.empty(shape, np.float32) for _ in range(2))

    def row(self, pages: Sequence[int]) -> "RowCache":
        """The tokens that lie in these pages, one after the other."""
        return RowCache(self._keys, self._values, pages)

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds to another one."""
        for array in (self._keys, self._values):
            array[:, :, target] = array[:, :, source]


class RowCache:
    """One row's part of a cache. Where its pages follow one another, which is usual, they are read in place."""

    def __init__(self, keys: Floats, values: Floats, pages: Sequence[int]):
        self._keys, self._values = keys, values
        first = pages[0]
        self._first = first if list(pages) == list(range(first, first + len(pages))) else None
        self._pages = np.array(pages)

    def append(self, layer: int, position: int, key: Floats, value: Floats) -> None:
        """Store what a layer made of new tokens. Shapes: key, value [num_tokens, num_key_value_heads, head_dim]."""
        places = np.arange(position, position + len(key))
        pages, within = self._pages[places // PAGE_TOKENS], places % PAGE_TOKENS
        self._keys[layer, :, pages, within], self._values[layer, :, pages, within] = key, value

    def seen(self, layer: int, begin: int, end: int) -> tuple[Floats, Floats]:
        """Keys and values of the tokens begin ... end - 1. Shapes: each [num_key_value_heads, end - begin, head_dim]"""
        return self._tokens(self._keys[layer], begin, end), self._tokens(self._values[layer], begin, end)

    def _tokens(self, array: Floats, begin: int, end: int) -> Floats:
        """Shapes: array [num_key_value_heads, num_pages, PAGE_TOKENS, head_dim]"""
        num_heads, _, _, head_dim = array.shape
        if self._first is not None:
            flat = array.reshape(num_heads, -1, head_dim)
            return flat[:, self._first * PAGE_TOKENS + begin : self._first * PAGE_TOKENS + end]
        first_page = begin // PAGE_TOKENS
        skipped = first_page * PAGE_TOKENS
        gathered = array[:, self._pages[first_page : pages_of(end)]].reshape(num_heads, -1, head_dim)
        return gathered[:, begin - skipped : end - skipped]
