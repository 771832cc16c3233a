"""The weights on the card, by the names the forward pass uses: views of one arena, where the upload puts the bytes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.kernels.tiles import TiledMatrix
from llmcli.runners.cuda.matrices import LayerMatrices, MatrixPlan
from llmcli.runners.cuda.memory import MemoryPlan, bias_region, has_bias, matrix_region
from llmcli.runners.cuda.regions import ARRAY_DTYPES, Arrays


@dataclass(frozen=True)
class Projection:
    """One matrix and its bias.

    `begin` is its first column in the outputs that it shares with other matrices, `activation_dtype` the type in which
    a product of many tokens takes its input. Shapes: bias float32 [16 * num_tiles] or None
    """

    matrix: TiledMatrix
    bias: Any
    activation_dtype: Any
    begin: int = 0

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that a product reads of it, with None for what it has not."""
        matrix = self.matrix
        return matrix.tiles, matrix.scales, matrix.zero_points, self.bias

    @property
    def num_rows(self) -> int:
        """Outputs, with the padding between layers that share the matrix."""
        return self.matrix.layout.num_rows

    @property
    def needs_finish(self) -> bool:
        """Whether a product's outputs still lack their row's scale, which only fp16 inputs have, or the bias."""
        return self.bias is not None or self.activation_dtype == np.float16

    @cached_property
    def output_bias(self) -> Any:
        """The bias without the last tile's padding. Shapes: float32 [num_rows] or None."""
        return None if self.bias is None else self.bias[: self.num_rows]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Shapes: norms float32, [hidden_size] or, of query and key, [head_dim]."""

    input_layernorm: Any
    qkv: tuple[Projection, ...]
    q_norm: Any
    k_norm: Any
    o: Projection
    post_attention_layernorm: Any
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its matrices, in the order of their use."""
        return *self.qkv, self.o, self.gate_up, self.down

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All its arrays, with None for what it has not."""
        norms = (self.input_layernorm, self.q_norm, self.k_norm, self.post_attention_layernorm)
        return *norms, *(array for projection in self.projections for array in projection.arrays)


@dataclass(frozen=True)
class Weights:
    """The whole model.

    `by_name` has every matrix by its plan's name.
    Shapes: embed_tokens [vocab_size, hidden_size]; table, the same with room for whole tiles of rows;
            cos_sin float32 [max_seq_len, head_dim / 2, 2]
    """

    embed_tokens: Any
    table: Any
    layers: tuple[LayerWeights, ...]
    norm: Any
    head: Projection
    cos_sin: Any
    by_name: dict[str, TiledMatrix]


def place_weights(plan: MemoryPlan, arena: Arrays) -> Weights:
    """The arrays of `plan.weights` under their names; their contents are as found."""
    config, matrices = plan.stored.config, plan.matrices
    by_name = {matrix.name: matrix.layout.place(arena[matrix_region(matrix)]) for matrix in matrices}

    def projection(matrix: MatrixPlan, begin: int = 0) -> Projection:
        bias = arena[bias_region(matrix)] if has_bias(config, matrix) else None
        return Projection(by_name[matrix.name], bias, ARRAY_DTYPES[matrix.format.activation_type], begin)

    def layer(index: int, planned: LayerMatrices) -> LayerWeights:
        prefix = f"model.layers.{index}"
        has_norms = config.traits.qk_norm
        return LayerWeights(
            input_layernorm=arena[f"{prefix}.input_layernorm.weight"],
            qkv=tuple(
                projection(matrix, begin) for matrix, begin in zip(planned.qkv, matrices.qkv_offsets, strict=False)
            ),
            q_norm=arena[f"{prefix}.self_attn.q_norm.weight"] if has_norms else None,
            k_norm=arena[f"{prefix}.self_attn.k_norm.weight"] if has_norms else None,
            o=projection(planned.o),
            post_attention_layernorm=arena[f"{prefix}.post_attention_layernorm.weight"],
            gate_up=projection(planned.gate_up),
            down=projection(planned.down),
        )

    return Weights(
        embed_tokens=arena[EMBEDDING][: config.vocab_size],
        table=arena[EMBEDDING],
        layers=tuple(layer(index, planned) for index, planned in enumerate(matrices.layers)),
        norm=arena["model.norm.weight"],
        head=projection(matrices.head),
        cos_sin=arena["cos_sin"],
        by_name=by_name,
    )
