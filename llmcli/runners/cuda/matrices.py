"""Which matrices a model has on the card: linear layers that share their input are one matrix, in tiles of their own
or, gate and up, in the halves of shared ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmcli.checkpoint.layout import WEIGHT_SUFFIX
from llmcli.errors import UnsupportedModelError
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, TileLayout, segment_offsets, tile_layout
from llmcli.runners.cuda.stored import MatrixFormat, StoredModel


@dataclass(frozen=True)
class Segment:
    """Where one linear layer's `num_rows` rows stand in a matrix: every `half_step`-th half tile from `first_half`."""

    module: str
    num_rows: int
    first_half: int
    half_step: int = 1


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix of the card: the weights of one or more linear layers that take the same input.

    Each layer begins with a tile or has one half of each, so the layout's rows count the padding of all but the last;
    outputs have these places too.
    """

    name: str
    segments: tuple[Segment, ...]
    format: MatrixFormat
    layout: TileLayout


@dataclass(frozen=True)
class LayerMatrices:
    """The matrices of one decoder layer.

    `qkv` is one matrix where the three are stored alike, else one for each. `gate_up` has gate in the first half of
    each tile and up in the second, so that whoever has a tile's outputs can multiply the two.
    """

    qkv: tuple[MatrixPlan, ...]
    o: MatrixPlan
    gate_up: MatrixPlan
    down: MatrixPlan

    def __iter__(self) -> Iterator[MatrixPlan]:
        """Each in the order in which a token passes them."""
        yield from (*self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True)
class ModelMatrices:
    """The matrices of a model; `qkv_offsets`: the columns at which query, key and value begin in a layer's outputs."""

    layers: tuple[LayerMatrices, ...]
    head: MatrixPlan
    qkv_offsets: tuple[int, ...]

    def __iter__(self) -> Iterator[MatrixPlan]:
        """Every matrix once, in the order in which a token passes them."""
        for layer in self.layers:
            yield from layer
        yield self.head


def plan_matrices(stored: StoredModel) -> ModelMatrices:
    """Arrange a model's linear layers.

    Query, key and value that are stored in different ways are separate matrices. Gate and up must be one, for the
    sake of the product of their outputs: where they differ, both are held as float32, which rounds nothing away.
    Raises: UnsupportedModelError for groups that no kernel reads
    """
    config = stored.config
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size

    def plan(name: str, segments: Sequence[Segment], num_rows: int, num_inputs: int, form: MatrixFormat) -> MatrixPlan:
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
        return MatrixPlan(name, tuple(segments), form, layout)

    def single(module: str, num_rows: int, num_inputs: int) -> MatrixPlan:
        return plan(module, [Segment(module, num_rows, 0)], num_rows, num_inputs, stored.format_of(module))

    def qkv(prefix: str) -> tuple[MatrixPlan, ...]:
        modules = [f"{prefix}.{part}_proj" for part in "qkv"]
        formats = [stored.format_of(module) for module in modules]
        if len(set(formats)) > 1:
            return tuple(single(module, size, hidden_size) for module, size in zip(modules, qkv_sizes, strict=True))
        segments = [
            Segment(module, size, offset // HALF_ROWS)
            for module, size, offset in zip(modules, qkv_sizes, qkv_offsets[:3], strict=True)
        ]
        return (plan(f"{prefix}.qkv", segments, qkv_offsets[2] + config.kv_size, hidden_size, formats[0]),)

    def gate_up(prefix: str) -> MatrixPlan:
        modules = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        formats = [stored.format_of(module) for module in modules]
        form = formats[0] if formats[0] == formats[1] else MatrixFormat("float32")
        segments = [Segment(module, intermediate_size, index, half_step=2) for index, module in enumerate(modules)]
        num_rows = -(-intermediate_size // HALF_ROWS) * TILE_ROWS
        return plan(f"{prefix}.gate_up", segments, num_rows, hidden_size, form)

    qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
    qkv_offsets = tuple(segment_offsets(qkv_sizes))
    layers = tuple(
        LayerMatrices(
            qkv=qkv(f"{prefix}.self_attn"),
            o=single(f"{prefix}.self_attn.o_proj", hidden_size, config.q_size),
            gate_up=gate_up(f"{prefix}.mlp"),
            down=single(f"{prefix}.mlp.down_proj", hidden_size, intermediate_size),
        )
        for prefix in (f"model.layers.{index}" for index in range(config.num_hidden_layers))
    )
    head = single(stored.head.removesuffix(WEIGHT_SUFFIX), config.vocab_size, hidden_size)
    return ModelMatrices(layers, head, qkv_offsets[:3])
