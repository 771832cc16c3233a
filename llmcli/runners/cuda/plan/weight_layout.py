"""How every weight lies on the card: its matrix, its tiles, its type and its bias.

Linear layers that take the same input form one matrix. Each has tiles of its own; gate and up share tiles, each with
one half of every tile. `Weights[Space]` is the plan, `Weights[Any]` the same on the card. Nothing here needs CuPy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from llmcli.checkpoint.layout import EMBEDDING, WEIGHT_SUFFIX
from llmcli.config.llama import LlamaConfig
from llmcli.errors import UnsupportedModelError
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, TileLayout, Widening, tile_layout
from llmcli.kernels.wide_plan import takes as takes_wide
from llmcli.runners.cuda.plan.regions import FLOAT32, INT32, Region, TiledRegion
from llmcli.runners.cuda.plan.stored import MatrixFormat, StoredModel

Space = Region | TiledRegion | None  # None: an array that does not exist, or the matrix of a tied head
A = TypeVar("A")  # Space while it is planned, an array or a TiledMatrix on the card


@dataclass(frozen=True)
class Linear:
    """One linear layer in a matrix: its `num_rows` rows fill every `half_step`-th half tile from `first_half` on."""

    module: str
    num_rows: int
    first_half: int
    half_step: int = 1


@dataclass(frozen=True)
class Projection(Generic[A]):
    """One matrix: the weights of one or more linear layers that take the same input, and their biases.

    A layer begins at a tile, or has one half of every tile. So the layout's rows include the padding of all layers but
    the last; outputs and biases are padded alike. Several matrices may write into the same outputs: `begin` is this
    matrix's first column there. Where groups are not of neighbouring inputs, columns were sorted: column i belongs to
    input order[i].
    Shapes: bias float32 [16 * num_tiles], or None; order int32 [num_inputs], or None
    """

    linears: tuple[Linear, ...]
    format: MatrixFormat
    layout: TileLayout
    matrix: A
    bias: A | None
    begin: int = 0
    order: A | None = None

    @property
    def num_rows(self) -> int:
        """Number of outputs, with the padding between layers of the matrix."""
        return self.layout.num_rows

    @property
    def is_float(self) -> bool:
        """Whether weights have 32 bits, and are multiplied in fp32."""
        return self.layout.weight_type == "float32"

    @property
    def arrays(self) -> tuple[Any, ...]:
        """On the card: the arrays that a product reads; None for an absent one."""
        matrix: Any = self.matrix
        return matrix.tiles, matrix.scales, matrix.zero_points, self.bias, self.order


@dataclass(frozen=True)
class LayerWeights(Generic[A]):
    """One decoder layer.

    `qkv` is one matrix if all three are stored alike, else three. `gate_up` has gate in the first half of each tile
    and up in the second, so a kernel that has a tile's outputs can multiply the two.
    Shapes: norms float32 [hidden_size]; q_norm, k_norm [head_dim], or None if absent
    """

    input_layernorm: A
    qkv: tuple[Projection[A], ...]
    q_norm: A | None
    k_norm: A | None
    o: Projection[A]
    post_attention_layernorm: A
    gate_up: Projection[A]
    down: Projection[A]

    @property
    def projections(self) -> tuple[Projection[A], ...]:
        """Its matrices, in the order in which a token passes them."""
        return *self.qkv, self.o, self.gate_up, self.down

    @property
    def arrays(self) -> tuple[Any, ...]:
        """On the card: all arrays of the layer; None for an absent one."""
        norms = (self.input_layernorm, self.q_norm, self.k_norm, self.post_attention_layernorm)
        return *norms, *(array for projection in self.projections for array in projection.arrays)


@dataclass(frozen=True)
class Weights(Generic[A]):
    """The whole model.

    `embed_tokens` is a matrix [vocab_size, hidden_size] in tiles, and also that of a tied head: see `with_widening`.
    Shapes: norm float32 [hidden_size]; cos_sin float32 [max_seq_len, head_dim / 2, 2]
    """

    embed_tokens: A
    layers: tuple[LayerWeights[A], ...]
    norm: A
    head: Projection[A]
    cos_sin: A

    @property
    def projections(self) -> Iterator[Projection[A]]:
        """Every matrix once, in the order in which a token passes them."""
        for layer in self.layers:
            yield from layer.projections
        yield self.head

    @property
    def norms(self) -> Iterator[tuple[str, A]]:
        """Every norm, with its tensor's name."""
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.input_layernorm
            for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
                if norm is not None:
                    yield f"{prefix}.self_attn.{name}.weight", norm
            yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm
        yield "model.norm.weight", self.norm


def with_widening(weights: Weights[Any], choose: Callable[[Projection[Any]], tuple[Widening, int]]) -> Weights[Any]:
    """The same weights on the card, each matrix with the widening and power that its scales have.

    A head that has no matrix of its own gets that of the embedding.
    """

    def widened(part: Projection[Any]) -> Projection[Any]:
        if not part.layout.has_scales:
            return part
        widening, power = choose(part)
        return replace(part, matrix=replace(part.matrix, widening=widening, power=power))

    def of_layer(layer: LayerWeights[Any]) -> LayerWeights[Any]:
        *qkv, o, gate_up, down = map(widened, layer.projections)
        return replace(layer, qkv=tuple(qkv), o=o, gate_up=gate_up, down=down)

    head = weights.head if weights.head.matrix is not None else replace(weights.head, matrix=weights.embed_tokens)
    return replace(weights, layers=tuple(map(of_layer, weights.layers)), head=widened(head))


def is_wide(projections: Iterable[Projection[Any]]) -> bool:
    """Whether many tokens are multiplied with all of these matrices as an image."""
    return all(takes_wide(part.layout) for part in projections)


def qkv_layout(config: LlamaConfig) -> QkvLayout:
    """How attention finds queries, keys and values in the outputs of their projection."""
    return QkvLayout(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def plan_weights(stored: StoredModel, max_seq_len: int) -> Weights[Space]:
    """Lay out a model's weights.

    Raises: UnsupportedModelError for groups that no kernel reads
    """
    config = stored.config
    head = _single(stored, stored.head.removesuffix(WEIGHT_SUFFIX), config.vocab_size, config.hidden_size)
    return Weights(
        embed_tokens=TiledRegion(tile_layout(stored.embedding_type, config.vocab_size, config.hidden_size)),
        layers=tuple(_layer(stored, f"model.layers.{index}") for index in range(config.num_hidden_layers)),
        norm=Region((config.hidden_size,), FLOAT32),
        head=replace(head, matrix=None) if stored.head == EMBEDDING else head,
        cos_sin=Region((max_seq_len, config.head_dim // 2, 2), FLOAT32),
    )


def _layer(stored: StoredModel, prefix: str) -> LayerWeights[Space]:
    config = stored.config
    hidden_norm, head_norm = Region((config.hidden_size,), FLOAT32), Region((config.head_dim,), FLOAT32)

    def norm_of_heads(name: str) -> Region | None:
        return head_norm if f"{prefix}.self_attn.{name}.weight" in stored.dtypes else None

    return LayerWeights(
        input_layernorm=hidden_norm,
        qkv=_qkv(stored, f"{prefix}.self_attn"),
        q_norm=norm_of_heads("q_norm"),
        k_norm=norm_of_heads("k_norm"),
        o=_single(stored, f"{prefix}.self_attn.o_proj", config.hidden_size, config.q_size),
        post_attention_layernorm=hidden_norm,
        gate_up=_gate_up(stored, f"{prefix}.mlp"),
        down=_single(stored, f"{prefix}.mlp.down_proj", config.hidden_size, config.intermediate_size),
    )


def _qkv(stored: StoredModel, prefix: str) -> tuple[Projection[Space], ...]:
    """One matrix in which each of the three begins at a tile; three matrices if they are not stored alike."""
    config, qkv = stored.config, qkv_layout(stored.config)
    layers = (
        (f"{prefix}.q_proj", qkv.q_size, 0),
        (f"{prefix}.k_proj", qkv.kv_size, qkv.k_offset),
        (f"{prefix}.v_proj", qkv.kv_size, qkv.v_offset),
    )
    formats = [stored.format_of(module) for module, _, _ in layers]
    if len(set(formats)) > 1:
        return tuple(_single(stored, module, size, config.hidden_size, begin) for module, size, begin in layers)
    linears = [Linear(module, size, begin // HALF_ROWS) for module, size, begin in layers]
    return (_projection(stored, f"{prefix}.qkv", linears, qkv.width, config.hidden_size, formats[0]),)


def _gate_up(stored: StoredModel, prefix: str) -> Projection[Space]:
    """One matrix, in which each of the two has one half of every tile.

    Kernels multiply the two outputs of a tile, so there must be one matrix. If the two are not stored alike, both are
    held as float32, which rounds nothing.
    """
    config = stored.config
    modules = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    gate, up = (stored.format_of(module) for module in modules)
    form = gate if gate == up else MatrixFormat("float32")
    linears = [Linear(module, config.intermediate_size, half, half_step=2) for half, module in enumerate(modules)]
    num_rows = -(-config.intermediate_size // HALF_ROWS) * TILE_ROWS
    return _projection(stored, f"{prefix}.gate_up", linears, num_rows, config.hidden_size, form)


def _single(stored: StoredModel, module: str, num_rows: int, num_inputs: int, begin: int = 0) -> Projection[Space]:
    """One linear layer as its own matrix."""
    linears = [Linear(module, num_rows, 0)]
    form = stored.format_of(module)
    return _projection(stored, module, linears, num_rows, num_inputs, form, begin)


def _projection(
    stored: StoredModel,
    name: str,
    linears: Sequence[Linear],
    num_rows: int,
    num_inputs: int,
    form: MatrixFormat,
    begin: int = 0,
) -> Projection[Space]:
    """Plan a matrix; `name` is for messages. It has a bias if the checkpoint stores one for any of the layers."""
    scheme = form.scheme
    try:
        layout = tile_layout(
            form.weight_type,
            num_rows,
            num_inputs,
            scheme.group_size if scheme else None,
            form.scale_type,
            scheme.is_symmetric if scheme else True,
        )
    except ValueError as error:
        raise UnsupportedModelError(f"{name}: {error} on CUDA; use --device cpu") from error
    has_bias = any(f"{linear.module}.bias" in stored.dtypes for linear in linears)
    bias = Region((layout.padded_rows,), FLOAT32) if has_bias else None
    order = Region((num_inputs,), INT32) if form.order is not None else None
    return Projection(tuple(linears), form, layout, TiledRegion(layout), bias, begin, order)
