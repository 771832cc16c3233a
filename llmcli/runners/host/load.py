"""What loading on the CPU has in common: reads weights in the order of the files, arranges them as a `Llama`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import PackedLayer, StoredLayer, read_layer
from llmcli.checkpoint.layout import WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.runners.host.cache import PagedCache
from llmcli.runners.host.llama import Array, Layer, Linear, Linears, Llama, Operators

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


class WeightForms(Protocol):
    """The forms in which a runner holds weights."""

    def plain(self, info: TensorInfo, reader: TensorReader) -> Array:
        """Read a plain tensor. Raises: CheckpointError for read errors, NaN and infinity"""

    def joined(self, shape: tuple[int, int], pieces: Iterator[tuple[int, npt.NDArray[np.float32]]]) -> Array:
        """A weight from pieces of its rows, each with the number of its first row."""

    def packed(self, layer: PackedLayer, stored: StoredLayer) -> Array:
        """A weight from codes."""


def read_weights(model: Model, forms: WeightForms, on_progress: OnProgress) -> dict[str, Array]:
    """Every weight, norm and bias by name; a quantized weight has the name of the plain one.

    Raises: CheckpointError for read errors, NaN and infinity, and layers whose tensors contradict one another
    """
    tensors = model.tensors
    infos = tensors.tensors
    total, read = sum(info.num_bytes for info in infos.values()), 0
    weights: dict[str, Array] = {}
    with TensorReader() as reader:
        for source, parts in tensors.sources.items():
            if source in tensors.packed:
                layer = tensors.packed[source]
                weights[source + WEIGHT_SUFFIX] = forms.packed(layer, read_layer(source, layer, infos, reader))
            elif source in tensors.scaled:
                scaled = tensors.scaled[source]
                weights[source + WEIGHT_SUFFIX] = forms.joined(scaled.shape, scaled.read(source, infos, reader))
            else:
                weights[source] = forms.plain(infos[source], reader)
            read += sum(info.num_bytes for info in parts)
            on_progress(read, total)
    return weights


def build(
    model: Model,
    norms: Mapping[str, Array],
    embed_tokens: Array,
    operators: Operators,
    linear: Callable[[str], Linear],
    linears: Callable[[Sequence[str]], Linears],
    cache: PagedCache,
    make: Callable[..., Llama] = Llama,
) -> Llama:
    """Arrange a model. `linear` and `linears` build layers from their names, such as `model.layers.0.mlp.up_proj`."""

    def layer(prefix: str) -> Layer:
        attention = f"{prefix}.self_attn"
        return Layer(
            input_layernorm=norms[f"{prefix}.input_layernorm.weight"],
            qkv_proj=linears([f"{attention}.{name}_proj" for name in "qkv"]),
            q_norm=norms.get(f"{attention}.q_norm.weight"),
            k_norm=norms.get(f"{attention}.k_norm.weight"),
            o_proj=linear(f"{attention}.o_proj"),
            post_attention_layernorm=norms[f"{prefix}.post_attention_layernorm.weight"],
            gate_up_proj=linears([f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]),
            down_proj=linear(f"{prefix}.mlp.down_proj"),
        )

    return make(
        config=model.config,
        operators=operators,
        embed_tokens=embed_tokens,
        layers=tuple(layer(f"model.layers.{index}") for index in range(model.config.num_hidden_layers)),
        norm=norms["model.norm.weight"],
        lm_head=linear(model.tensors.head.removesuffix(WEIGHT_SUFFIX)),
        inverse_frequencies=model.config.rope.inverse_frequencies(model.config.head_dim),
        cache=cache,
    )


def describe(model: Model, dtype: str) -> str:
    """Name the types of weights and arithmetic: `int4 weights, bfloat16`, or one type if both are the same."""
    types = [f"int{bits}" for bits in sorted({layer.scheme.num_bits for layer in model.tensors.packed.values()})]
    if model.tensors.scaled:
        types.append("fp8")
    return f"{' and '.join(types)} weights, {dtype}" if types else dtype
