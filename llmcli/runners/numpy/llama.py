"""The LLaMA forward pass for one row of tokens, in numpy and float32: what `runners/torch/llama.py` computes there.

Both are tested against transformers. The traits of related families (biases, norms of query and key, sliding windows,
layers without rotary) are fields.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import AllLogits, HiddenStates
from llmcli.runners.host.device import Hidden
from llmcli.runners.numpy.cache import Floats, PagedCache, RowCache


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias. Shapes: weight [output_size, input_size]; bias [output_size] or None"""

    weight: Floats
    bias: Floats | None = None

    def __call__(self, x: Floats) -> Floats:
        """Apply to x [num_tokens, input_size]; result [num_tokens, output_size]."""
        y: Floats = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class RMSNorm:
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, eq. 4)."""

    weight: Floats
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """Apply to x [..., size]; result has its shape."""
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        y: Floats = self.weight * (x * (1 / np.sqrt(mean + np.float32(self.eps))))
        return y


@dataclass(frozen=True)
class Layer:
    """One decoder layer; the fields carry Hugging Face's names."""

    input_layernorm: RMSNorm
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: Linear
    post_attention_layernorm: RMSNorm
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding in Hugging Face's half-split form: the pairs are (i, i + head_dim / 2).

    Shapes: x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]; result as x
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def silu(x: Floats) -> Floats:
    """x / (1 + e^-x), the activation of LLaMA's MLP; e^-x may overflow, and the result is then 0."""
    y: Floats = x / (1 + np.exp(-x))
    return y


def attend(query: Floats, keys: Floats, values: Floats, position: int, window: int | None) -> Floats:
    """Causal attention of new tokens; `position` is the first one's index among `keys`.

    With a window, a token sees only that many tokens, itself included. The query heads that share a key-value head
    are stacked along the token axis, so that keys and values are neither repeated nor read twice.
    Shapes: query [num_tokens, num_attention_heads, head_dim]; keys, values
            [num_key_value_heads, position + num_tokens, head_dim]; result [num_tokens, q_size]
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
class Llama:
    """The whole model: the `HostModel` of the numpy runner.

    Shapes: embed_tokens [vocab_size, hidden_size]; inverse_frequencies [head_dim / 2]
    """

    config: LlamaConfig
    embed_tokens: Floats
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Linear
    inverse_frequencies: Floats
    cache: PagedCache

    @np.errstate(over="ignore", invalid="ignore")  # what overflows in a broken model, the sampler reports
    def forward(self, parts: Sequence[Sequence[int]], position: int, pages: Sequence[int]) -> Hidden:
        """Run the tokens of one row; see `HostModel.forward`."""
        cache = self.cache.row(pages)
        outputs: list[Hidden] = []
        for token_ids in parts:
            outputs += deque(self._layer_by_layer(token_ids, position, cache), maxlen=1)
            position += len(token_ids)
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    @np.errstate(over="ignore", invalid="ignore")
    def hidden_states(
        self,
        parts: Sequence[Sequence[int]],
        position: int,
        pages: Sequence[int],
        inputs: HiddenStates | None,
    ) -> HiddenStates:
        """Run the tokens of one row layer by layer; see `HostModel.hidden_states`."""
        cache, begin = self.cache.row(pages), 0
        states = np.empty((len(self.layers) + 1, sum(map(len, parts)), self.config.hidden_size), np.float32)
        for token_ids in parts:
            some = slice(begin, begin + len(token_ids))
            for index, hidden in enumerate(self._layer_by_layer(token_ids, position + begin, cache)):
                states[index, some] = hidden
                if inputs is not None:
                    hidden[:] = inputs[index, some]
            begin = some.stop
        return states

    def _layer_by_layer(self, token_ids: Sequence[int], position: int, cache: RowCache) -> Iterator[Hidden]:
        """Yield the embeddings, then the output of each layer.

        The next layer reads what was yielded, even if it has been overwritten meanwhile.
        Shapes: [num_tokens, hidden_size]
        """
        num_tokens = len(token_ids)
        end = position + num_tokens
        head_dim, traits = self.config.head_dim, self.config.traits
        positions = np.arange(position, end, dtype=np.float32)
        angles = (positions[:, None] * self.inverse_frequencies)[:, None, :]  # [num_tokens, 1, head_dim / 2]
        magnitude = np.float32(self.config.rope.attention_factor)
        cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude

        hidden: Hidden = self.embed_tokens[list(token_ids)]  # [num_tokens, hidden_size]
        yield hidden
        for index, layer in enumerate(self.layers):
            x = layer.input_layernorm(hidden)
            query = layer.q_proj(x).reshape(num_tokens, -1, head_dim)
            key = layer.k_proj(x).reshape(num_tokens, -1, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
            if traits.uses_rope[index]:
                query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            value = layer.v_proj(x).reshape(num_tokens, -1, head_dim)
            cache.append(index, position, key, value)
            window = traits.sliding_windows[index]
            # What the first new token sees; none sees further back.
            begin = 0 if window is None else max(0, position + 1 - window)
            mixed = attend(query, *cache.seen(index, begin, end), position - begin, window)
            hidden = hidden + layer.o_proj(mixed)

            x = layer.post_attention_layernorm(hidden)
            hidden = hidden + layer.down_proj(silu(layer.gate_proj(x)) * layer.up_proj(x))
            yield hidden

    @np.errstate(over="ignore", invalid="ignore")
    def logits(self, hidden: Hidden) -> AllLogits:
        """Scores of every vocabulary entry; see `HostModel.logits`."""
        return self.lm_head(self.norm(hidden))

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self.cache.copy_page(source, target)
