"""Cuts weights into pieces for the upload, and plans the card's memory for pieces. Needs no CuPy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from llmcli.checkpoint.layout import EMBEDDING, WEIGHT_SUFFIX
from llmcli.kernels.repack import row_bytes
from llmcli.kernels.tiles import TILE_ROWS
from llmcli.quantization.schemes import Fp8Scheme
from llmcli.runners.cuda.plan.regions import ARRAY_DTYPES, BYTE, INT32, Region, held_bytes
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import Linear, Projection, Space, Weights

# One thread copies about 10 GB/s out of the page cache; eight keep a PCIe 5 bus busy. Pinned memory is slow to get.
NUM_SLOTS = 8
SLOT_BYTES = 32 * 2**20

CODES, SCALE, ZERO_POINT = ".weight_packed", ".weight_scale", ".weight_zero_point"

A = TypeVar("A")  # Region while it is planned, an array on the card


@dataclass(frozen=True)
class Staging(Generic[A]):
    """The card's memory that loading needs, besides the weights.

    Shapes: slots uint8, one piece each; flags int32 [float tensors, 2]
    """

    slots: tuple[A, ...]
    flags: A


@dataclass(frozen=True)
class LinearTensor:
    """A tensor of a linear layer: the end of its name, and the bytes of a row (`pitch`).

    A row of the tensor holds `rows_per_row` rows of the weight: several for zero points, a divisor of a tile's rows.
    """

    suffix: str
    pitch: int
    rows_per_row: int = 1


@dataclass(frozen=True)
class RowRange:
    """Rows `begin` ... `end` - 1 of a weight, and the bytes of the tensor that hold them."""

    begin: int
    end: int
    first_byte: int
    num_bytes: int


def is_unpacked(stored: StoredModel, projection: Projection[Space], linear: Linear) -> bool:
    """Whether a layer's codes become float32 because another layer of its matrix is stored differently."""
    return linear.module in stored.packed and not projection.layout.has_scales


def parts_of(stored: StoredModel, projection: Projection[Space], linear: Linear) -> tuple[LinearTensor, ...]:
    """The tensors of one linear layer as they reach the card, without the bias."""
    num_inputs, scheme = projection.layout.num_inputs, projection.format.scheme
    is_fp8 = isinstance(stored.packed.get(linear.module), Fp8Scheme)
    if is_unpacked(stored, projection, linear):
        return (LinearTensor(WEIGHT_SUFFIX if is_fp8 else CODES, row_bytes("float32", num_inputs)),)
    if scheme is None:
        name = linear.module + WEIGHT_SUFFIX
        return (LinearTensor(WEIGHT_SUFFIX, row_bytes(stored.dtypes[name], num_inputs)),)
    num_groups = scheme.num_groups(num_inputs)
    scale = f".{stored.scale_of(linear.module)}" if is_fp8 else SCALE
    scale_itemsize = ARRAY_DTYPES[stored.dtypes[linear.module + scale]].itemsize
    codes = LinearTensor(WEIGHT_SUFFIX if is_fp8 else CODES, row_bytes(projection.layout.weight_type, num_inputs))
    # 8-bit floats have scales for each row, or for each half tile.
    scales = LinearTensor(scale, num_groups * scale_itemsize, rows_per_row=projection.layout.scale_rows)
    if isinstance(scheme, Fp8Scheme) or scheme.is_symmetric:
        return codes, scales
    return codes, scales, LinearTensor(ZERO_POINT, num_groups * 4, rows_per_row=32 // scheme.num_bits)


def row_ranges(part: LinearTensor, num_rows: int) -> Iterator[RowRange]:
    """Cut a tensor into pieces: whole tiles of the weight's rows."""
    step = _rows_of_piece(part)
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        first, last = begin // part.rows_per_row, -(-end // part.rows_per_row)
        yield RowRange(begin, end, first * part.pitch, (last - first) * part.pitch)


def embedding_part(stored: StoredModel) -> LinearTensor:
    """The embedding's table as a part."""
    return LinearTensor(WEIGHT_SUFFIX, stored.config.hidden_size * ARRAY_DTYPES[stored.dtypes[EMBEDDING]].itemsize)


def plan_staging(stored: StoredModel, weights: Weights[Space]) -> Staging[Region]:
    """Plan slots for the largest piece."""
    config = stored.config
    parts = [(embedding_part(stored), config.vocab_size)]
    for projection in weights.projections:
        for linear in projection.linears:
            parts += [(part, linear.num_rows) for part in parts_of(stored, projection, linear)]
    # All norms and biases are one piece.
    small = sum(held_bytes(norm) for _, norm in weights.norms)
    small += sum(held_bytes(projection.bias) for projection in weights.projections)
    slot = Region((max(small, *(_largest_piece(part, num_rows) for part, num_rows in parts)),), BYTE)
    return Staging(slots=(slot,) * NUM_SLOTS, flags=Region((len(stored.dtypes), 2), INT32))


def _rows_of_piece(part: LinearTensor) -> int:
    """Rows of a weight in a piece: as many whole tiles as a slot holds, at least one."""
    return max(SLOT_BYTES * part.rows_per_row // part.pitch // TILE_ROWS, 1) * TILE_ROWS


def _largest_piece(part: LinearTensor, num_rows: int) -> int:
    return next(row_ranges(part, num_rows)).num_bytes
