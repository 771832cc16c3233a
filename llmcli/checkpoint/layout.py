"""Which tensors a LLaMA-like checkpoint holds, under which names and shapes."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmcli.config.llama import LlamaConfig

BASE_PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WEIGHT_SUFFIX = ".weight"
WEIGHT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor the model needs: its name, its shape, and the config fields the shape comes from.

    `is_linear` marks the matrices [output_size, input_size] of linear layers, which may be stored quantized instead.
    `other_shapes` are as good as `shape`.
    """

    name: str
    shape: tuple[int, ...]
    reason: str
    is_linear: bool = False
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    other_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def layer(self) -> str:
        """The module's name, as quantization configs list it."""
        return self.name.removesuffix(WEIGHT_SUFFIX)


def expected_tensors(config: LlamaConfig) -> Iterator[ExpectedTensor]:
    """Every tensor of the model but the output head, in the order in which a token passes them.

    Shapes: linear weights are [output_size, input_size], as Hugging Face stores them.
    """
    hidden = ("hidden_size", config.hidden_size)
    intermediate = ("intermediate_size", config.intermediate_size)
    query = (f"num_attention_heads {config.num_attention_heads} * head_dim {config.head_dim}", config.q_size)
    key_value = (f"num_key_value_heads {config.num_key_value_heads} * head_dim {config.head_dim}", config.kv_size)

    def tensor(name: str, *sizes: tuple[str, int], is_linear: bool = False) -> ExpectedTensor:
        reason = ", ".join(reason for reason, _ in sizes)
        return ExpectedTensor(name, tuple(size for _, size in sizes), reason, is_linear)

    def linear(name: str, output: tuple[str, int], input_: tuple[str, int], has_bias: bool) -> Iterator[ExpectedTensor]:
        yield tensor(f"{name}.weight", output, input_, is_linear=True)
        if has_bias:
            yield tensor(f"{name}.bias", output)

    traits = config.traits
    yield tensor(EMBEDDING, ("vocab_size", config.vocab_size), hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield tensor(f"{layer}.input_layernorm.weight", hidden)
        yield from linear(f"{layer}.self_attn.q_proj", query, hidden, traits.qkv_bias)
        yield from linear(f"{layer}.self_attn.k_proj", key_value, hidden, traits.qkv_bias)
        yield from linear(f"{layer}.self_attn.v_proj", key_value, hidden, traits.qkv_bias)
        if traits.qk_norm:
            yield tensor(f"{layer}.self_attn.q_norm.weight", ("head_dim", config.head_dim))
            yield tensor(f"{layer}.self_attn.k_norm.weight", ("head_dim", config.head_dim))
        yield from linear(f"{layer}.self_attn.o_proj", hidden, query, traits.o_bias)
        yield tensor(f"{layer}.post_attention_layernorm.weight", hidden)
        yield from linear(f"{layer}.mlp.gate_proj", intermediate, hidden, traits.mlp_bias)
        yield from linear(f"{layer}.mlp.up_proj", intermediate, hidden, traits.mlp_bias)
        yield from linear(f"{layer}.mlp.down_proj", hidden, intermediate, traits.mlp_bias)
    yield tensor("model.norm.weight", hidden)
