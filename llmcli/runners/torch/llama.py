"""The LLaMA forward pass for one row of tokens, in plain torch operations.

Residual stream, norms, softmax and rotary angles are float32; weights and KV cache keep their storage type.
The traits of related families (biases, norms of query and key, sliding windows, layers without rotary) are fields.
Source: Hugging Face modeling_llama.py and its relatives, whose logits the tests compare with.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.llama import LlamaConfig
from llmcli.runners.torch.cache import RowCache
from llmcli.runners.torch.joined_linear import JoinedLinear, SeparateLinears
from llmcli.runners.torch.packed_linear import PackedLinear
from llmcli.runners.torch.reordered_linear import ReorderedLinear
from llmcli.runners.torch.token_operators import TokenOperators, TokenPlace


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias, in the weight's type, returned in float32.

    Shapes: weight [output_size, input_size]; bias [output_size] or None; x [num_tokens, input_size] float32
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size]; result [num_tokens, output_size] float32."""
        x = x.to(self.weight.dtype)
        if len(x) == 1 and x.dtype == torch.bfloat16:
            with without_onednn():
                return F.linear(x, self.weight, self.bias).float()
        return F.linear(x, self.weight, self.bias).float()

    def each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply to each part by itself."""
        return [self(x) for x in xs]


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let torch multiply by itself: one token in bfloat16 takes half of oneDNN's time, which pads it to a tile.

    `torch.backends.mkldnn.flags` is not used, as it sets other switches too and warns of one of them.
    """
    try:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        yield
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


Projection = Linear | PackedLinear | ReorderedLinear
Projections = JoinedLinear | SeparateLinears


@dataclass(frozen=True)
class RMSNorm:
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, in float32 (arXiv 1910.07467, eq. 4).

    Shapes: weight [hidden_size] float32
    """

    weight: Tensor
    eps: float
    operators: TokenOperators | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, hidden_size] float32; result has its shape."""
        if self.operators is not None:
            return self.operators.rms_norm(x, self.weight, self.eps)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


@dataclass(frozen=True)
class Layer:
    """One decoder layer; the fields carry Hugging Face's names, joined where layers have the same input."""

    input_layernorm: RMSNorm
    qkv_proj: Projections
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: Projection
    post_attention_layernorm: RMSNorm
    gate_up_proj: Projections
    down_proj: Projection


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split form: the pairs are (i, i + head_dim / 2).

    Shapes: x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]; result as x
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> Tensor:
    """Causal attention of new tokens; `position` is the first one's index among `keys`.

    With a window, a token sees only that many tokens, itself included. The query heads that share a key-value head
    are stacked along the token axis, so that keys and values are neither repeated nor read twice.
    Shapes: query [num_tokens, num_attention_heads, head_dim] float32; keys, values
            [num_key_value_heads, position + num_tokens, head_dim]; result [num_tokens, q_size] float32
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
class Place:
    """Where some tokens are in their row: the first one's position, and the rotary angles of all.

    Shapes: cos, sin [num_tokens, 1, head_dim / 2] float32
    """

    position: int
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Llama:
    """The whole model. With `operators` these replace torch's small ones.

    Shapes: embed_tokens [vocab_size, hidden_size]; inverse_frequencies [head_dim / 2] float32
    """

    config: LlamaConfig
    embed_tokens: Tensor
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Projection
    inverse_frequencies: Tensor
    operators: TokenOperators | None = None

    def forward(self, parts: Sequence[Tensor], position: int, cache: RowCache) -> Tensor:
        """Run new tokens of one row, append their keys and values to the cache, return the last hidden states.

        Each part has the bits of a call of its own: parts share nothing but the widened weights.
        Shapes: parts [num_tokens] int64 each, at the positions from `position` on; result [num_tokens, hidden_size]
                float32, of all parts
        """
        (hidden,) = deque(self.layer_by_layer(parts, position, cache), maxlen=1)
        return torch.cat(hidden)

    def layer_by_layer(self, parts: Sequence[Tensor], position: int, cache: RowCache) -> Iterator[list[Tensor]]:
        """Do what `forward` does: yield the embeddings of each part, then the outputs of each layer.

        The next layer reads what was yielded, even if it has been overwritten meanwhile.
        Shapes: [num_tokens, hidden_size] float32 for each part
        """
        begins = accumulate((len(part) for part in parts[:-1]), initial=position)
        places = [self._place(begin, len(part)) for begin, part in zip(begins, parts, strict=True)]
        hidden = [F.embedding(part, self.embed_tokens).float() for part in parts]  # [num_tokens, hidden_size]
        yield hidden
        for index, layer in enumerate(self.layers):
            x = [layer.input_layernorm(of) for of in hidden]
            projected = zip(places, *layer.qkv_proj.each(x), strict=True)
            mixed = [self._attend(index, place, query, key, value, cache) for place, query, key, value in projected]
            hidden = [of + more for of, more in zip(hidden, layer.o_proj.each(mixed), strict=True)]

            x = [layer.post_attention_layernorm(of) for of in hidden]
            gated = zip(*layer.gate_up_proj.each(x), strict=True)
            down = layer.down_proj.each([self._swiglu(gate, up) for gate, up in gated])
            hidden = [of + more for of, more in zip(hidden, down, strict=True)]
            yield hidden

    def _place(self, position: int, num_tokens: int) -> Place:
        positions = torch.arange(position, position + num_tokens, dtype=torch.float32)
        angles = (positions[:, None] * self.inverse_frequencies)[:, None, :]  # [num_tokens, 1, head_dim / 2]
        magnitude = self.config.rope.attention_factor
        return Place(position, angles.cos() * magnitude, angles.sin() * magnitude)

    def _attend(self, index: int, place: Place, query: Tensor, key: Tensor, value: Tensor, cache: RowCache) -> Tensor:
        """Attention of one part in one layer. Shapes: all but `cache` [num_tokens, ...], as projected"""
        layer, traits, position = self.layers[index], self.config.traits, place.position
        query, key, value = (of.view(len(of), -1, self.config.head_dim) for of in (query, key, value))
        window = traits.sliding_windows[index]
        # What the first new token sees; none sees further back.
        begin = 0 if window is None else max(0, position + 1 - window)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        if self.operators is not None and len(query) == 1 and self.operators.can_attend(cache, self.config.head_dim):
            weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
            angles = (place.cos, place.sin) if traits.uses_rope[index] else None
            seen = TokenPlace(cache, index, begin, position)
            return self.operators.attend(query, key, value, weights, angles, seen)
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        if traits.uses_rope[index]:
            query, key = rotate(query, place.cos, place.sin), rotate(key, place.cos, place.sin)
        cache.append(index, position, key, value)
        return attend(query, *cache.seen(index, begin, position + len(query)), position - begin, window)

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up if self.operators is None else self.operators.swiglu(gate, up)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary entry.

        Shapes: hidden [num_tokens, hidden_size] float32; result [num_tokens, vocab_size] float32
        """
        return self.lm_head(self.norm(hidden))
