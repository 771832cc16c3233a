"""RMSNorm, SwiGLU and attention of a token by our own C++, `kernels/cpu/token_operators.cpp`.

Between the products of packed weights, torch's operators cost a decoded token more by their calls than by their
arithmetic. A token's bits depend on that token and on those it sees.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcli.runners.host.cache import RowCache
from llmcli.runners.host.llama import Array, Llama, Place
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.operators import TorchOperators

STEM = "token_operators"

# Numbers of a head that the source takes at a time.
LANES = 16


class _TokenAttention(ctypes.Structure):
    """`TokenAttention` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "query_norm", "key_norm")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "num_pages")),
    )


@dataclass(frozen=True)
class TokenPlace:
    """Where a token is: its row, the layer, the first token that it sees, its position."""

    cache: RowCache
    layer: int
    begin: int
    position: int


class TokenOperators(TorchOperators):
    """Torch's operators, of which these are the functions of the source. All tensors are float32."""

    def __init__(self, library: Any):
        pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        library.rms_norm.argtypes = (pointer, pointer, real, number, number, pointer, number)
        library.swiglu.argtypes = (pointer, pointer, ctypes.c_int64, pointer, number)
        library.attend.argtypes = (
            *(ctypes.POINTER(_TokenAttention), *(pointer,) * 6),
            *(number, number, pointer, number),
        )
        for function in (library.rms_norm, library.swiglu, library.attend):
            function.restype = None
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operators.rms_norm`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        sizes = x.numel() // size, size
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, *sizes, y.data_ptr(), torch.get_num_threads())
        return y

    def swiglu(self, gate: Tensor, up: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Operators.swiglu`."""
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        self._library.swiglu(gate.data_ptr(), up.data_ptr(), y.numel(), y.data_ptr(), torch.get_num_threads())
        return y

    def attend_token(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        angles: tuple[Tensor, Tensor] | None,
        place: TokenPlace,
    ) -> Tensor:
        """Norm and rotate the heads of one token, store its key and value, and attend to the tokens it sees.

        `norms` are the weights of query and key, and eps; `angles` cos and sin. `query` and `key` are overwritten.
        Shapes: query [1, num_attention_heads, head_dim]; key, value [1, num_key_value_heads, head_dim]; weights
                [head_dim]; cos, sin [head_dim / 2] numbers; result [1, q_size]
        """
        keys, values = place.cache.layer(place.layer)
        pages = torch.from_numpy(place.cache.pages)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        query_norm, key_norm, eps = (None, None, 0.0) if norms is None else norms
        cos, sin = (None, None) if angles is None else angles
        num_heads, head_dim = query.shape[1:]
        attention = _TokenAttention(
            *map(_pointer, (keys, values, query_norm, key_norm)), eps, num_heads, len(keys), head_dim, keys.shape[1]
        )
        y = torch.empty(1, num_heads * head_dim)
        pointers = map(_pointer, (query, key, value, cos, sin, pages))
        self._library.attend(attention, *pointers, place.begin, place.position, y.data_ptr(), torch.get_num_threads())
        return y


class FusedLlama(Llama):
    """A model with `TokenOperators`, whose attention of one token is a single call."""

    def attend(self, index: int, place: Place, query: Tensor, key: Tensor, value: Tensor, cache: RowCache) -> Array:
        """See `Llama.attend`."""
        head_dim, layer = self.config.head_dim, self.layers[index]
        if len(place.cos) > 1 or cache.layer(index)[0].dtype != torch.bfloat16 or head_dim % LANES:
            return super().attend(index, place, query, key, value, cache)
        assert isinstance(self.operators, TokenOperators)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm, self.config.rms_norm_eps
        angles = (place.cos, place.sin) if self.config.traits.uses_rope[index] else None
        query, key, value = (of[place.tokens].view(1, -1, head_dim) for of in (query, key, value))
        seen = TokenPlace(cache, index, self.first_seen(index, place.position), place.position)
        return self.operators.attend_token(query, key, value, norms, angles, seen)


def token_operators() -> TokenOperators | None:
    """The operators where they can run, as our own products can."""
    library = codes_product.library()
    return None if library is None else TokenOperators(library)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
