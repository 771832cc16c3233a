"""The operators of the forward pass in plain torch, a plain linear layer, and the KV cache's arrays."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.llama import LlamaConfig
from llmcli.runners.host.cache import PagedCache, cache_shape
from llmcli.runners.host.memory import CODES

CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, CODES: torch.int8}

_LARGEST_CODE = 127
_LARGEST_VALUE = 65504.0  # of float16: the card multiplies in it, and both round in the same way


class TorchOperators:
    """See `Operators`."""

    def running(self) -> AbstractContextManager[object]:
        """Nothing is kept for gradients."""
        return torch.inference_mode()

    def array(self, values: Any) -> Tensor:
        """See `Operators.array`."""
        return torch.from_numpy(values)

    def numpy(self, array: Tensor) -> Any:
        """See `Operators.numpy`."""
        return array.numpy()

    def join(self, arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
        """See `Operators.join`."""
        return arrays[0] if len(arrays) == 1 else torch.cat(tuple(arrays), axis)

    def embed(self, weight: Tensor, token_ids: Sequence[int]) -> Tensor:
        """See `Operators.embed`."""
        return F.embedding(torch.tensor(token_ids), weight).float()

    def cos_sin(self, angles: Any) -> tuple[Tensor, Tensor]:
        """See `Operators.cos_sin`."""
        of_torch = torch.from_numpy(angles)
        return of_torch.cos(), of_torch.sin()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operators.rms_norm`."""
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    def swiglu(self, gate: Tensor, up: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Operators.swiglu`."""
        return by_part(F.silu, gate, sizes) * up

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> Tensor:
        """See `Operators.attend`.

        The query heads that share a key-value head are stacked along the token axis, so that keys and values are
        neither repeated nor read twice.
        """
        num_tokens, num_attention_heads, head_dim = query.shape
        num_key_value_heads, seq_len, _ = keys.shape
        group_size = num_attention_heads // num_key_value_heads
        stacked = query.view(num_tokens, num_key_value_heads, group_size, head_dim).permute(1, 2, 0, 3)
        stacked = stacked.reshape(1, num_key_value_heads, group_size * num_tokens, head_dim).to(keys.dtype)
        mask = None
        if num_tokens > 1:
            mask = torch.ones(num_tokens, seq_len, dtype=torch.bool).tril(position)
            if window is not None:
                mask = mask.triu(position + 1 - window)
            mask = mask.repeat(group_size, 1)
        mixed = F.scaled_dot_product_attention(stacked, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask)
        mixed = mixed.view(num_key_value_heads, group_size, num_tokens, head_dim).permute(2, 0, 1, 3)
        return mixed.reshape(num_tokens, num_attention_heads * head_dim).float()


@dataclass(frozen=True)
class PlainLinear:
    """y = x @ weight.T + bias, in the weight's type, returned in float32.

    Shapes: weight [output_size, input_size]; bias [output_size] or None
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`."""
        return by_part(self._multiply, x, sizes)

    def _multiply(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if len(x) == 1 and x.dtype == torch.bfloat16:
            with without_onednn():
                return F.linear(x, self.weight, self.bias).float()
        return F.linear(x, self.weight, self.bias).float()


def by_part(function: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Apply a function to each part of `x` alone, in memory of its own: bits may depend on how it is aligned."""
    if len(sizes) < 2:
        return function(x)
    return torch.cat([function(part.clone()) for part in torch.split(x, list(sizes))])


@contextmanager
def without_onednn() -> Any:
    """Let torch multiply by itself: one token in bfloat16 takes half of oneDNN's time, which pads it to a tile.

    `torch.backends.mkldnn.flags` is not used, as it sets other switches too and warns of one of them.
    """
    try:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        yield
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def empty_cache(config: LlamaConfig, num_pages: int, cache_type: str) -> PagedCache:
    """Keys and values of that type: of the type of the run, or 8-bit codes."""
    shape = cache_shape(config, num_pages)
    keys, values = (torch.empty(shape, dtype=CACHE_DTYPES[cache_type]) for _ in range(2))
    if cache_type != CODES:
        return PagedCache(keys, values, take_pages)
    return PagedCache(keys, values, take_pages, [torch.empty(shape[:-1]) for _ in range(2)], quantize)


def take_pages(array: Tensor, pages: Any) -> Tensor:
    """Some pages of keys or values. Indexing `array[:, pages]` takes fifteen times as long."""
    return array.index_select(1, torch.from_numpy(pages))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of head vectors: scale = largest magnitude / 127, codes rounded to nearest, ties to even.

    NaN makes the scale NaN, so that a broken model shows.
    Shapes: x [..., head_dim]; codes int8, its shape; scales float32 [...]
    """
    x = x.float().clamp(-_LARGEST_VALUE, _LARGEST_VALUE)
    scales = x.abs().amax(-1) / _LARGEST_CODE
    # A vector of zeros has the scale 0, and any codes: 0 / 1.
    codes = (x / torch.where(scales == 0, 1.0, scales)[..., None]).round()
    return codes.nan_to_num(0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales
