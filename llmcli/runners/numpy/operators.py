"""The operators of the forward pass in numpy, and a plain linear layer. All is float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.runners.host.cache import PagedCache, cache_shape

Floats = npt.NDArray[np.float32]


class NumpyOperators:
    """See `Operators`."""

    def running(self) -> np.errstate:
        """What overflows in a broken model, the sampler reports."""
        return np.errstate(over="ignore", invalid="ignore")

    def array(self, values: Floats) -> Floats:
        """As it is."""
        return values

    def numpy(self, array: Floats) -> Floats:
        """As it is."""
        return array

    def join(self, arrays: Sequence[Floats], axis: int = 0) -> Floats:
        """See `Operators.join`."""
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)

    def embed(self, weight: Floats, token_ids: Sequence[int]) -> Floats:
        """See `Operators.embed`."""
        return weight[list(token_ids)]

    def cos_sin(self, angles: Floats) -> tuple[Floats, Floats]:
        """See `Operators.cos_sin`."""
        return np.cos(angles), np.sin(angles)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """See `Operators.rms_norm`."""
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        y: Floats = weight * (x * (1 / np.sqrt(mean + np.float32(eps))))
        return y

    def swiglu(self, gate: Floats, up: Floats, sizes: Sequence[int]) -> Floats:
        """See `Operators.swiglu`; e^-gate may overflow, and the result is then 0."""
        y: Floats = gate / (1 + np.exp(-gate)) * up
        return y

    def attend(self, query: Floats, keys: Floats, values: Floats, position: int, window: int | None) -> Floats:
        """See `Operators.attend`.

        The query heads that share a key-value head are stacked along the token axis, so that keys and values are
        neither repeated nor read twice.
        """
        num_tokens, num_attention_heads, head_dim = query.shape
        num_key_value_heads, seq_len, _ = keys.shape
        group_size = num_attention_heads // num_key_value_heads
        stacked = query.reshape(num_tokens, num_key_value_heads, group_size, head_dim).transpose(1, 2, 0, 3)
        stacked = stacked.reshape(num_key_value_heads, group_size * num_tokens, head_dim) * np.float32(head_dim**-0.5)
        scores: Floats = stacked @ keys.transpose(0, 2, 1)  # [num_key_value_heads, group_size * num_tokens, seq_len]
        if num_tokens > 1:
            ages = np.arange(position, position + num_tokens)[:, None] - np.arange(seq_len)
            hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
            scores[:, np.tile(hidden, (group_size, 1))] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        mixed: Floats = (scores @ values).reshape(num_key_value_heads, group_size, num_tokens, head_dim)
        return mixed.transpose(2, 0, 1, 3).reshape(num_tokens, num_attention_heads * head_dim)


@dataclass(frozen=True)
class PlainLinear:
    """y = x @ weight.T + bias. Shapes: weight [output_size, input_size]; bias [output_size] or None"""

    weight: Floats
    bias: Floats | None = None

    def __call__(self, x: Floats, sizes: Sequence[int] = ()) -> Floats:
        """See `Linear`."""
        y: Floats = by_part(lambda part: part @ self.weight.T, x, sizes)
        return y if self.bias is None else y + self.bias


def by_part(function: Callable[[Floats], Floats], x: Floats, sizes: Sequence[int]) -> Floats:
    """Apply a function to each part of `x` alone."""
    if len(sizes) < 2:
        return function(x)
    return np.concatenate([function(x[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)])


def empty_cache(config: LlamaConfig, num_pages: int) -> PagedCache:
    """Keys and values in float32."""
    keys, values = (np.empty(cache_shape(config, num_pages), np.float32) for _ in range(2))
    return PagedCache(keys, values, lambda array, pages: array[:, pages])
