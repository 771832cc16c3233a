"""The LLaMA that is trained here, in plain torch, with Hugging Face's names for every weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, by their names in config.json."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024

    def to_dict(self) -> dict[str, float]:
        """The fields as config.json holds them."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to unit mean square, then by the weight."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + head_dim / 2), Hugging Face's half-split form.

    Shapes: x [num_rows, num_heads, num_tokens, head_dim]; cos, sin [num_tokens, head_dim / 2] float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Attend to what came before, within the mask where one is given."""
        num_rows, num_tokens, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(num_rows, num_tokens, -1, self.shape.head_dim).transpose(
                1, 2
            )  # [num_rows, heads, num_tokens, 64]

        q, k, v = (
            rotate(heads(self.q_proj(x)), cos, sin),
            rotate(heads(self.k_proj(x)), cos, sin),
            heads(self.v_proj(x)),
        )
        if mask is None or isinstance(mask, Tensor):
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        else:
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(num_rows, num_tokens, -1))  # [num_rows, num_tokens, heads * 64]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, widen, narrow."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Embedding, layers, norm, and the embedding again as the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        # Output projections start smaller, so that the residual stream does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.shape.num_hidden_layers) ** (0.5 if is_output else 0))

    def forward(self, token_ids: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        """Logits of the next token.

        Shapes: token_ids [num_rows, num_tokens] int64; result [num_rows, num_tokens, vocab_size].
        """
        num_tokens = token_ids.shape[1]
        cos, sin = self.cos[:num_tokens], self.sin[:num_tokens]
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def num_parameters(self) -> int:
        """Number of weights; the tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
