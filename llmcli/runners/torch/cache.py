"""`PagedCache`: keys and values in pages, in the type of the run or as 8-bit codes with scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import PAGE_TOKENS, pages_of
from llmcli.runners.host.memory import CODES

CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, CODES: torch.int8}

_LARGEST_CODE = 127
_LARGEST_VALUE = 65504.0  # of float16: the card multiplies in it, and both round in the same way


class PagedCache:
    """Keys (already rotated) and values of all rows.

    As int8, a token's vector of one head is scale * codes: scale = largest magnitude / 127, codes rounded to nearest,
    ties to even. A token takes part in attention as it is stored, also in the step that adds it.
    Shapes: keys, values [num_hidden_layers, num_key_value_heads, num_pages, PAGE_TOKENS, head_dim], of int8 with scales
            float32 [num_hidden_layers, num_key_value_heads, num_pages, PAGE_TOKENS]
    """

    def __init__(self, config: LlamaConfig, num_pages: int, cache_type: str):
        places = (config.num_hidden_layers, config.num_key_value_heads, num_pages, PAGE_TOKENS)
        self._has_codes = cache_type == CODES
        dtype = CACHE_DTYPES[cache_type]
        self._keys, self._values = (torch.empty(*places, config.head_dim, dtype=dtype) for _ in range(2))
        self._key_scales, self._value_scales = (torch.empty(places if self._has_codes else 0) for _ in range(2))

    def row(self, pages: Sequence[int]) -> RowCache:
        """The tokens that lie in these pages, one after the other."""
        return RowCache(self, pages)

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds to another one."""
        for array in self._arrays():
            array[:, :, target] = array[:, :, source]

    def _arrays(self) -> tuple[Tensor, ...]:
        plain = (self._keys, self._values)
        return (*plain, self._key_scales, self._value_scales) if self._has_codes else plain


class RowCache:
    """One row's part of a cache. Where its pages follow one another, which is usual, they are read in place."""

    def __init__(self, cache: PagedCache, pages: Sequence[int]):
        self._cache = cache
        first = pages[0]
        self._first = first if list(pages) == list(range(first, first + len(pages))) else None
        self._pages = torch.tensor(pages)
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of this step's parts

    @property
    def dtype(self) -> torch.dtype:
        """The type that keys and values are stored in."""
        return self._cache._keys.dtype

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all rows, and the numbers of this row's pages.

        Shapes: keys, values [num_key_value_heads, num_pages, PAGE_TOKENS, head_dim]; pages int64
        """
        return self._cache._keys[layer], self._cache._values[layer], self._pages

    def append(self, layer: int, position: int, key: Tensor, value: Tensor) -> None:
        """Store a layer's keys and values of tokens. Shapes: key, value [num_tokens, num_key_value_heads, head_dim]."""
        cache = self._cache
        stored = ((cache._keys, cache._key_scales, key), (cache._values, cache._value_scales, value))
        for array, scales, new in stored:
            if cache._has_codes:
                codes, new_scales = quantize(new.transpose(0, 1))
                self._store(array[layer], position, codes)
                self._store(scales[layer], position, new_scales)
            else:
                self._store(array[layer], position, new.transpose(0, 1))

    def _store(self, array: Tensor, position: int, new: Tensor) -> None:
        """Shapes: array [num_key_value_heads, num_pages, PAGE_TOKENS, ...]; new [num_key_value_heads, n, ...]"""
        num_tokens = new.shape[1]
        if self._first is not None:
            self._tokens(array, position, position + num_tokens).copy_(new)
        else:
            pages, within = self._places_of(position, num_tokens)
            array[:, pages, within] = new.to(array.dtype)

    def _places_of(self, position: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Page of each new token, and its index there; all layers use them. Shapes: each int64 [num_tokens]"""
        if (position, num_tokens) not in self._places:
            places = torch.arange(position, position + num_tokens)
            self._places[position, num_tokens] = self._pages[places // PAGE_TOKENS], places % PAGE_TOKENS
        return self._places[position, num_tokens]

    def seen(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens begin ... end - 1; codes are widened to float32.

        Shapes: each [num_key_value_heads, end - begin, head_dim]
        """
        cache = self._cache
        keys, values = (self._tokens(array[layer], begin, end) for array in (cache._keys, cache._values))
        if not cache._has_codes:
            return keys, values
        scales = (self._tokens(array[layer], begin, end) for array in (cache._key_scales, cache._value_scales))
        key_scales, value_scales = scales
        return keys * key_scales[..., None], values * value_scales[..., None]

    def _tokens(self, array: Tensor, begin: int, end: int) -> Tensor:
        """Shapes: array [num_key_value_heads, num_pages, PAGE_TOKENS, ...]; result [num_key_value_heads, n, ...]"""
        if self._first is not None:
            flat = array.flatten(1, 2)
            return flat[:, self._first * PAGE_TOKENS + begin : self._first * PAGE_TOKENS + end]
        first_page = begin // PAGE_TOKENS
        skipped = first_page * PAGE_TOKENS
        gathered = array.index_select(1, self._pages[first_page : pages_of(end)]).flatten(1, 2)
        return gathered[:, begin - skipped : end - skipped]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of head vectors; NaN makes the scale NaN, so that a broken model shows.

    Shapes: x [..., head_dim]; codes int8, its shape; scales float32 [...]
    """
    x = x.float().clamp(-_LARGEST_VALUE, _LARGEST_VALUE)
    scales = x.abs().amax(-1) / _LARGEST_CODE
    # A vector of zeros has the scale 0, and any codes: 0 / 1.
    codes = (x / torch.where(scales == 0, 1.0, scales)[..., None]).round()
    return codes.nan_to_num(0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales
