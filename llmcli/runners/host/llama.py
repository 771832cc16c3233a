"""The LLaMA forward pass for new tokens of one row, in the plain operators of a library: numpy or torch.

Residual stream, norms, softmax and rotary angles are float32; weights and KV cache keep their storage type.
The traits of related families (biases, norms of query and key, sliding windows, layers without rotary) are fields.
Source: Hugging Face modeling_llama.py and its relatives, whose logits the tests compare with.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import AllLogits, HiddenStates
from llmcli.runners.host.cache import PagedCache, RowCache

Array = Any  # of the library; float32 where nothing else is said
Hidden = npt.NDArray[np.float32]  # [num_tokens, hidden_size]

# A linear layer in any form of its weight: y = x @ weight.T + bias, of x [num_tokens, input_size] and the sizes of its
# parts; see `Operators`. And several with the same input.
Linear = Callable[..., Array]
Linears = Callable[[Array, Sequence[int]], Sequence[Array]]


class Operators(Protocol):
    """What a library computes. The `sizes` of parts are their numbers of tokens, () for a single part.

    The products, SwiGLU and attention of a part have the bits that they have alone, as chunks of a prompt and the
    tokens after it must. The other operators give each token the same bits in any company.
    """

    def running(self) -> AbstractContextManager[object]:
        """The state of the library in which the others are called."""

    def array(self, values: Hidden) -> Array:
        """The same memory as an array of the library."""

    def numpy(self, array: Array) -> Hidden:
        """The same memory as an array of numpy."""

    def join(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """One array after the other."""

    def embed(self, weight: Array, token_ids: Sequence[int]) -> Array:
        """Rows of `weight` in new memory. Shapes: weight [vocab_size, hidden_size]; result [num_tokens, hidden_size]"""

    def cos_sin(self, angles: npt.NDArray[np.float32]) -> tuple[Array, Array]:
        """Cosine and sine of each angle."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, eq. 4)."""

    def swiglu(self, gate: Array, up: Array, sizes: Sequence[int]) -> Array:
        """silu(gate) * up, with silu(x) = x / (1 + e^-x). Shapes: each [num_tokens, intermediate_size]"""

    def attend(self, query: Array, keys: Array, values: Array, position: int, window: int | None) -> Array:
        """Causal attention of one part; `position` is the first new token's index among `keys`.

        With a window, a token sees only that many tokens, itself included.
        Shapes: query [num_tokens, num_attention_heads, head_dim]; keys, values
                [num_key_value_heads, position + num_tokens, head_dim] as stored; result [num_tokens, q_size]
        """


@dataclass(frozen=True)
class SeparateLinears:
    """Layers that are multiplied one after the other."""

    layers: Sequence[Linear]

    def __call__(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        """The result of each."""
        return [layer(x, sizes) for layer in self.layers]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; the fields carry Hugging Face's names, joined where layers have the same input.

    Shapes: layernorms [hidden_size]; q_norm, k_norm [head_dim] or None
    """

    input_layernorm: Array
    qkv_proj: Linears
    q_norm: Array | None
    k_norm: Array | None
    o_proj: Linear
    post_attention_layernorm: Array
    gate_up_proj: Linears
    down_proj: Linear


def rotate(operators: Operators, x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding in Hugging Face's half-split form: the pairs are (i, i + head_dim / 2).

    Shapes: x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]; result as x
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return operators.join((first * cos - second * sin, second * cos + first * sin), axis=-1)


@dataclass(frozen=True)
class Place:
    """Where the tokens of a part are: among the new tokens, and in their row; and the rotary angles of all.

    Shapes: cos, sin [num_tokens, 1, head_dim / 2]
    """

    tokens: slice
    position: int
    cos: Array
    sin: Array


@dataclass(frozen=True)
class Llama:
    """The weights and the KV cache of a model, and what computes with them.

    Shapes: embed_tokens [vocab_size, hidden_size]; norm [hidden_size]; inverse_frequencies [head_dim / 2]
    """

    config: LlamaConfig
    operators: Operators
    embed_tokens: Array
    layers: tuple[Layer, ...]
    norm: Array
    lm_head: Linear
    inverse_frequencies: npt.NDArray[np.float32]
    cache: PagedCache

    def forward(self, parts: Sequence[Sequence[int]], position: int, pages: Sequence[int]) -> Hidden:
        """Run the tokens of one row from `position` on, and write their keys and values into its pages.

        Each part has the bits of a call of its own, and sees what earlier parts have written.
        Shapes: result [num_tokens, hidden_size], the last hidden states of all parts
        """
        with self.operators.running():
            (hidden,) = deque(self._layer_by_layer(parts, position, self.cache.row(pages)), maxlen=1)
            return self.operators.numpy(hidden)

    def hidden_states(
        self, parts: Sequence[Sequence[int]], position: int, pages: Sequence[int], inputs: HiddenStates | None
    ) -> HiddenStates:
        """Do what `forward` does; return the embeddings of all parts and the output of every layer.

        With `inputs`, each layer gets their entry for the layer before; see `Runner.hidden_states`.
        """
        states = np.empty((len(self.layers) + 1, sum(map(len, parts)), self.config.hidden_size), np.float32)
        with self.operators.running():
            for index, hidden in enumerate(self._layer_by_layer(parts, position, self.cache.row(pages))):
                same_memory = self.operators.numpy(hidden)
                states[index] = same_memory
                if inputs is not None:
                    same_memory[:] = inputs[index]
        return states

    def logits(self, hidden: Hidden) -> AllLogits:
        """Scores of every vocabulary entry. Shapes: result [num_tokens, vocab_size]"""
        with self.operators.running():
            return self.operators.numpy(self.lm_head(self._norm(self.operators.array(hidden), self.norm)))

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        with self.operators.running():
            self.cache.copy_page(source, target)

    def _layer_by_layer(self, parts: Sequence[Sequence[int]], position: int, cache: RowCache) -> Iterator[Array]:
        """Yield the embeddings, then the output of each layer.

        The next layer reads what was yielded, even if it has been overwritten meanwhile.
        Shapes: [num_tokens, hidden_size]
        """
        operators, sizes = self.operators, [len(part) for part in parts]
        places = self._places(sizes, position)
        hidden = operators.embed(self.embed_tokens, list(chain(*parts)))  # [num_tokens, hidden_size]
        yield hidden
        for index, layer in enumerate(self.layers):
            x = self._norm(hidden, layer.input_layernorm)
            query, key, value = layer.qkv_proj(x, sizes)
            mixed = [self.attend(index, place, query, key, value, cache) for place in places]
            hidden = hidden + layer.o_proj(operators.join(mixed), sizes)

            x = self._norm(hidden, layer.post_attention_layernorm)
            gate, up = layer.gate_up_proj(x, sizes)
            hidden = hidden + layer.down_proj(operators.swiglu(gate, up, sizes), sizes)
            yield hidden

    def attend(self, index: int, place: Place, query: Array, key: Array, value: Array, cache: RowCache) -> Array:
        """Attention of one part in one layer. Shapes: query, key, value of all parts; result [num_tokens, q_size]"""
        layer, num_tokens = self.layers[index], len(place.cos)
        heads = num_tokens, -1, self.config.head_dim
        query, key, value = (of[place.tokens].reshape(heads) for of in (query, key, value))
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        if self.config.traits.uses_rope[index]:
            query, key = (rotate(self.operators, of, place.cos, place.sin) for of in (query, key))
        cache.append(index, place.position, key, value)
        begin, window = self.first_seen(index, place.position), self.config.traits.sliding_windows[index]
        keys, values = cache.seen(index, begin, place.position + num_tokens)
        return self.operators.attend(query, keys, values, place.position - begin, window)

    def first_seen(self, index: int, position: int) -> int:
        """The first token that one at `position` sees in a layer; later ones see no further back."""
        window = self.config.traits.sliding_windows[index]
        return 0 if window is None else max(0, position + 1 - window)

    def _norm(self, x: Array, weight: Array) -> Array:
        return self.operators.rms_norm(x, weight, self.config.rms_norm_eps)

    def _places(self, sizes: Sequence[int], position: int) -> list[Place]:
        places, begin = [], 0
        for size in sizes:
            positions = np.arange(position + begin, position + begin + size, dtype=np.float32)
            angles = (positions[:, None] * self.inverse_frequencies)[:, None, :]  # [num_tokens, 1, head_dim / 2]
            cos, sin = self.operators.cos_sin(angles)
            magnitude = self.config.rope.attention_factor
            places.append(Place(slice(begin, begin + size), position + begin, cos * magnitude, sin * magnitude))
            begin += size
        return places
