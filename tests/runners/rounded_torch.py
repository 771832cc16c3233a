"""The torch model in float32 with roundings where the CUDA runner has them, so that the two can be compared closely.

Inputs of products are rounded to float16, and so are their weights, unless these have 32 bits. A norm's inputs are
rounded times its weights, before they are divided by their root. Attention of several tokens rounds scaled queries and
weights to the cache's type, that of a lone token rounds nothing. Keys and values always have the cache's type. With
int8 codes the type of attention is float16, and it is the products of weights and value scales that are rounded.
Prompts are cut where the card cuts them.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.checkpoint.model import Model
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.gemv import GATED_SCALE
from llmcli.runners.cuda.plan.memory import PREFILL_CHUNKS
from llmcli.runners.host import device
from llmcli.runners.host.cache import PagedCache
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch import load
from llmcli.runners.torch.operators import PlainLinear, TorchOperators, empty_cache
from llmcli.runners.torch.packed_linear import WideningProduct
from llmcli.runners.torch.weights import PackedWeight


class RoundedProduct(WideningProduct):
    """A quantized layer."""

    def __init__(self, weight: PackedWeight):
        super().__init__(weight, torch.float32)
        self._whole = widened(weight.widened(slice(None)))

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._whole)


def widened(weight: Tensor) -> Tensor:
    """Rounded to float16, with one power of two for the matrix, so that small weights keep their bits."""
    power = torch.exp2(weight.abs().max().clamp(min=2.0**-100).log2().floor())
    return (weight / power).half().float() * power


def rounded_rows(x: Tensor) -> Tensor:
    """Rounded to float16, with the power of two of each row that kernels/common/norm_sums.cuh gives."""
    largest = x.abs().amax(-1, keepdim=True)
    is_scaled = (largest > 0) & ((largest < 2.0**-8) | (largest > 2.0**15))
    power = torch.where(is_scaled, torch.exp2(largest.clamp(min=2.0**-100).log2().floor() - 14), 1.0)
    return (x / power).half().float() * power


def mix_in_blocks(scores: Tensor, values: Tensor, dtype: torch.dtype, has_codes: bool) -> Tensor:
    """softmax(scores, base 2) @ values as arXiv 2307.08691 does it: weights rounded block by block of cached tokens,
    relative to the largest score until then.

    Shapes: scores [num_heads, num_tokens, seq_len]; values [num_heads, seq_len, head_dim]; result as scores @ values
    """
    block = 64 if values.shape[-1] <= (96 if has_codes else 128) else 32
    # float16 keeps small weights apart by a factor that cancels out.
    factor = 2.0 ** (6 if has_codes else 15) if dtype == torch.float16 else 1.0
    largest = torch.full(scores.shape[:2], -math.inf)
    total, mixed = torch.zeros(scores.shape[:2]), torch.zeros(*scores.shape[:2], values.shape[-1])
    for some_scores, some_values in zip(scores.split(block, -1), values.split(block, 1), strict=True):
        larger = torch.maximum(largest, some_scores.amax(-1))
        base = larger.nan_to_num(neginf=0.0)
        fading = torch.exp2(largest - base)
        weights = torch.exp2(some_scores - base[..., None])
        if has_codes:  # the largest code of a vector is 127 or -127
            scales = (some_values.abs().amax(-1) / 127).clamp(min=1e-30)
            weights_of_codes = weights * scales[:, None]
            rounded = (weights_of_codes * factor).to(dtype).float() / factor / scales[:, None]
        else:
            rounded = (weights * factor).to(dtype).float() / factor
        total = total * fading + weights.sum(-1)
        mixed = mixed * fading[..., None] + rounded @ some_values
        largest = larger
    return mixed / total[..., None]


def load_rounded(
    monkeypatch: pytest.MonkeyPatch, model: Model, dtype: torch.dtype, max_seq_len: int, kv_cache: str = "auto"
) -> SteppingRunner:
    """A torch runner whose plain weights have `dtype`, its cache that or float16, and whose arithmetic is float32."""
    has_codes = kv_cache == "int8"
    cache_dtype = torch.float32 if dtype == torch.float32 and not has_codes else torch.float16

    def rms_norm(self: TorchOperators, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if dtype == torch.float32 or x.dim() > 2:  # not of heads
            return weight * (x * factor)
        return rounded_rows(weight * x) * factor

    def swiglu(self: TorchOperators, gate: Tensor, up: Tensor, sizes: Sequence[int]) -> Tensor:
        result = F.silu(gate) * up
        return result if dtype == torch.float32 else (result / GATED_SCALE).half().float() * GATED_SCALE

    def multiply(self: PlainLinear, x: Tensor) -> Tensor:
        weight, bias = self.weight, None if self.bias is None else self.bias.float()
        if dtype != torch.float32:
            weight = weight.half().float()
        return F.linear(x, weight, bias)

    def attend(
        self: TorchOperators, query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None
    ) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        group_size = num_heads // len(keys)
        keys, values = (cached.float().repeat_interleave(group_size, 0) for cached in (keys, values))
        scaled = query.transpose(0, 1) * (head_dim**-0.5 * math.log2(math.e))
        is_rounded = num_tokens > 1 and cache_dtype != torch.float32
        scores = (scaled.to(cache_dtype).float() if is_rounded else scaled) @ keys.transpose(1, 2)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(position)
        if window is not None:
            seen = seen.triu(position + 1 - window)
        scores = scores.masked_fill(~seen, -math.inf)
        mixed = mix_in_blocks(scores, values, cache_dtype if is_rounded else torch.float32, has_codes)
        mixed = mixed.transpose(0, 1).reshape(num_tokens, -1)
        return mixed if dtype == torch.float32 else mixed.half().float()

    def rounding_cache(config: LlamaConfig, num_pages: int, cache_type: str) -> PagedCache:
        cache = empty_cache(config, num_pages, cache_type)
        if not has_codes:
            cache.arrays = tuple(array.to(cache_dtype) for array in cache.arrays)
        return cache

    read_weights = load.read_weights

    def read_rounded(*arguments: Any) -> dict[str, Any]:
        return {
            name: weight.to(dtype).float() if isinstance(weight, Tensor) and weight.dim() == 2 else weight
            for name, weight in read_weights(*arguments).items()
        }

    monkeypatch.setattr(load, "read_weights", read_rounded)
    choose_product = "llmcli.runners.torch.packed_linear.choose_product"
    monkeypatch.setattr(choose_product, lambda weight, _: RoundedProduct(weight))
    monkeypatch.setattr(PlainLinear, "_multiply", multiply)
    for operator in (rms_norm, swiglu, attend):
        monkeypatch.setattr(TorchOperators, operator.__name__, operator)
    monkeypatch.setattr(load, "empty_cache", rounding_cache)
    monkeypatch.setattr(device, "PREFILL_CHUNK", PREFILL_CHUNKS[0])
    monkeypatch.setattr(device, "_CHUNKS", ())
    return load.load(model, max_seq_len=max_seq_len, kv_cache=kv_cache)
