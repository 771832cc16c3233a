"""`RowCache`: the keys and values of one row, in the type of the run or as 8-bit codes with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.config.llama import LlamaConfig

CODES = "int8"
CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, CODES: torch.int8}

_LARGEST_CODE = 127
_LARGEST_VALUE = 65504.0  # float16's: the card multiplies in it, and both round alike
_SCALE_BYTES = 4  # float32: 16 bits would save 1.5 % at head_dim 128 and lose the small values of some tokens


def cache_bytes(config: LlamaConfig, max_seq_len: int, cache_type: str) -> int:
    """Memory of one row."""
    scale_bytes = _SCALE_BYTES if cache_type == CODES else 0
    return config.kv_cache_bytes(max_seq_len, CACHE_DTYPES[cache_type].itemsize, scale_bytes)


class RowCache:
    """Keys (already rotated) and values of one row.

    As int8, a token's vector of one head is scale * codes: scale = largest magnitude / 127, codes rounded to nearest,
    ties to even. A token takes part in attention as it is stored, also in the step that brings it.
    Shapes: keys, values [num_hidden_layers, num_key_value_heads, max_seq_len, head_dim], of int8 with scales float32
            [num_hidden_layers, num_key_value_heads, max_seq_len]
    """

    def __init__(self, config: LlamaConfig, max_seq_len: int, cache_type: str):
        heads = (config.num_hidden_layers, config.num_key_value_heads, max_seq_len)
        self._has_codes = cache_type == CODES
        dtype = CACHE_DTYPES[cache_type]
        self._keys, self._values = (torch.empty(*heads, config.head_dim, dtype=dtype) for _ in range(2))
        self._key_scales, self._value_scales = (torch.empty(heads if self._has_codes else 0) for _ in range(2))

    def append(self, layer: int, position: int, key: Tensor, value: Tensor) -> None:
        """Store what a layer made of new tokens. Shapes: key, value [num_tokens, num_key_value_heads, head_dim]."""
        new = slice(position, position + len(key))
        if not self._has_codes:
            self._keys[layer, :, new] = key.transpose(0, 1)
            self._values[layer, :, new] = value.transpose(0, 1)
            return
        self._keys[layer, :, new], self._key_scales[layer, :, new] = quantize(key.transpose(0, 1))
        self._values[layer, :, new], self._value_scales[layer, :, new] = quantize(value.transpose(0, 1))

    def seen(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens begin ... end - 1, of codes in float32.

        Shapes: each [num_key_value_heads, end - begin, head_dim]
        """
        keys, values = self._keys[layer, :, begin:end], self._values[layer, :, begin:end]
        if not self._has_codes:
            return keys, values
        key_scales, value_scales = self._key_scales[layer, :, begin:end], self._value_scales[layer, :, begin:end]
        return keys * key_scales[..., None], values * value_scales[..., None]

    def copy_from(self, other: RowCache, num_tokens: int) -> None:
        """Take over the first tokens of a row of the same shape."""
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[:, :, :num_tokens] = theirs[:, :, :num_tokens]

    def _arrays(self) -> tuple[Tensor, ...]:
        plain = (self._keys, self._values)
        return (*plain, self._key_scales, self._value_scales) if self._has_codes else plain


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of head vectors; NaN makes its scale NaN, so that a broken model shows.

    Shapes: x [..., head_dim]; codes int8, its shape; scales float32 [...]
    """
    x = x.float().clamp(-_LARGEST_VALUE, _LARGEST_VALUE)
    scales = x.abs().amax(-1) / _LARGEST_CODE
    # A vector of zeros has the scale 0, and any codes: 0 / 1.
    codes = (x / torch.where(scales == 0, 1.0, scales)[..., None]).round()
    return codes.nan_to_num(0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales
