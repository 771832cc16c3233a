"""Builds the decoder layers of a model on the CPU from weights under Hugging Face's names."""

from collections.abc import Callable, Container
from typing import Any, TypeVar

LayerT = TypeVar("LayerT")


def build_layers(
    num_layers: int,
    weight_names: Container[str],
    make_layer: Callable[..., LayerT],
    linear: Callable[[str], Any],
    norm: Callable[[str], Any],
) -> tuple[LayerT, ...]:
    """All layers in order. `linear` and `norm` build a module from its name, such as `model.layers.0.mlp.up_proj`.

    Whether a layer has norms of query and key follows from `weight_names`.
    """

    def optional_norm(name: str) -> Any | None:
        return norm(name) if f"{name}.weight" in weight_names else None

    def layer(prefix: str) -> LayerT:
        return make_layer(
            input_layernorm=norm(f"{prefix}.input_layernorm"),
            q_proj=linear(f"{prefix}.self_attn.q_proj"),
            k_proj=linear(f"{prefix}.self_attn.k_proj"),
            v_proj=linear(f"{prefix}.self_attn.v_proj"),
            q_norm=optional_norm(f"{prefix}.self_attn.q_norm"),
            k_norm=optional_norm(f"{prefix}.self_attn.k_norm"),
            o_proj=linear(f"{prefix}.self_attn.o_proj"),
            post_attention_layernorm=norm(f"{prefix}.post_attention_layernorm"),
            gate_proj=linear(f"{prefix}.mlp.gate_proj"),
            up_proj=linear(f"{prefix}.mlp.up_proj"),
            down_proj=linear(f"{prefix}.mlp.down_proj"),
        )

    return tuple(layer(f"model.layers.{index}") for index in range(num_layers))
