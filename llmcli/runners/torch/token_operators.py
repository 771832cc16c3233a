"""RMSNorm, SwiGLU and attention of a token by our own C++, `kernels/cpu/token_operators.cpp`.

Between the products of packed weights, torch's operators cost a decoded token more by their calls than by their
arithmetic. A token's bits depend on that token and on those it sees.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.cpp_library import open_library
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.cache import RowCache

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


class TokenOperators:
    """The functions of the source. All tensors are float32."""

    def __init__(self, library: Any):
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """What `RMSNorm` computes. Shapes: x [..., hidden_size]; weight [hidden_size]; result as x"""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        sizes = x.numel() // size, size
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, *sizes, y.data_ptr(), torch.get_num_threads())
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up. Shapes: [num_tokens, intermediate_size] each, and the result"""
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        self._library.swiglu(gate.data_ptr(), up.data_ptr(), y.numel(), y.data_ptr(), torch.get_num_threads())
        return y

    def attend(
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
        keys, values, pages = place.cache.layer(place.layer)
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

    @staticmethod
    def can_attend(cache: RowCache, head_dim: int) -> bool:
        """Whether the source can read such keys and values."""
        return cache.dtype == torch.bfloat16 and head_dim % LANES == 0


_opened: dict[str, TokenOperators | None] = {}  # by set of instructions


def token_operators(on_compile: OnCompile = say_nothing) -> TokenOperators | None:
    """The operators where they can run, as our own products can; compiles them if needed."""
    wanted = codes_product.instructions()
    if wanted is None:
        return None
    if wanted not in _opened:
        library = open_library(wanted, on_compile)
        if library is not None:
            pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
            library.rms_norm.argtypes = (pointer, pointer, real, number, number, pointer, number)
            library.swiglu.argtypes = (pointer, pointer, ctypes.c_int64, pointer, number)
            library.attend.argtypes = (
                *(ctypes.POINTER(_TokenAttention), *(pointer,) * 6),
                *(number, number, pointer, number),
            )
            for function in (library.rms_norm, library.swiglu, library.attend):
                function.restype = None
        _opened[wanted] = None if library is None else TokenOperators(library)
    return _opened[wanted]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
