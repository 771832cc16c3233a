"""Weight matrices on the card in tiles of 16 rows: their sizes, before a byte is allocated, and the arrays themselves.

kernels/common/tile.cuh describes the layout. Nothing here needs a card.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

TILE_ROWS = 16
HALF_ROWS = TILE_ROWS // 2  # where two tensors share tiles, each has one half of each
UNIT_BYTES = 1024  # 64 bytes of each row of a tile
_UNIT_ROW_BYTES = UNIT_BYTES // TILE_ROWS
_MAX_GROUPS_PER_UNIT = 8
# The units of a span: 128 inputs, or of 32-bit weights 16. A matrix has whole spans.
SPAN_UNITS = {"int8": 2, "fp8": 2, "int4": 1, "float16": 4, "bfloat16": 4, "float32": 1}
_SCALED = ("int8", "int4", "fp8")
_HALF_TYPES = ("float16", "bfloat16")
ALIGNMENT = 256  # of every array inside an arena, in bytes

WEIGHT_BITS = {"int8": 8, "fp8": 8, "int4": 4, "float16": 16, "bfloat16": 16, "float32": 32}
WEIGHT_C_TYPES = {
    "int8": "Int8",
    "fp8": "Fp8",
    "int4": "Int4",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
}
BLOCK_SCALE = "block"  # float32, one for the rows of a half tile: scales of blocks of 8-bit floats
SCALE_C_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", BLOCK_SCALE: "BlockScale"}
SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    BLOCK_SCALE: np.dtype(np.float32),
}


@dataclass(frozen=True)
class TileLayout:
    """One matrix [num_rows, num_inputs] as tiles, without its bytes.

    weight_type is a key of WEIGHT_BITS. Codes and fp8 (e4m3) have scales of `scale_type`, one for each `group_size`
    inputs of a row (None: one a row). Codes that are not symmetric have zero points. `group_size` is a stored size
    (`stored_group_size`).
    """

    weight_type: str
    num_rows: int
    num_inputs: int
    group_size: int | None = None
    scale_type: str | None = None
    is_symmetric: bool = True

    def __post_init__(self) -> None:
        """Refuse what no kernel reads.

        Raises: ValueError
        """
        if self.num_rows < 1 or self.num_inputs < 1:
            raise ValueError(f"a matrix of {self.num_rows} x {self.num_inputs} weights has no tiles")
        if self.has_scales != (self.scale_type is not None):
            raise ValueError(f"{self.weight_type} weights with scales of type {self.scale_type}")
        if not (self.has_codes or self.is_symmetric) or not (self.has_scales or self.group_size is None):
            raise ValueError(f"{self.weight_type} weights have neither groups nor zero points")
        if self.scale_type == BLOCK_SCALE and self.weight_type != "fp8":
            raise ValueError(f"{self.weight_type} weights have no scales of blocks")
        if self.has_scales and self.group_size != stored_group_size(
            self.weight_type, self.group_size, self.num_inputs, _has_row_scale(self.is_symmetric, self.scale_type)
        ):
            raise ValueError(f"group size {self.group_size} is not a stored one")

    @property
    def has_codes(self) -> bool:
        """Whether weights are integers with scales."""
        return self.weight_type in ("int8", "int4")

    @property
    def has_scales(self) -> bool:
        """Whether weights have scales: codes and 8-bit floats."""
        return self.weight_type in _SCALED

    @property
    def unit_inputs(self) -> int:
        """Inputs of one unit: those in 64 bytes of a row."""
        return _UNIT_ROW_BYTES * 8 // WEIGHT_BITS[self.weight_type]

    @property
    def span_inputs(self) -> int:
        """Inputs that are multiplied together; with codes their activations have one scale."""
        return _span_inputs(self.weight_type)

    @property
    def num_spans(self) -> int:
        """Spans of a tile, the last one padded."""
        return -(-self.num_inputs // self.span_inputs)

    @property
    def num_units(self) -> int:
        """Units of a tile: those of whole spans."""
        return self.num_spans * SPAN_UNITS[self.weight_type]

    @property
    def num_tiles(self) -> int:
        """Tiles of the matrix, the last one padded."""
        return -(-self.num_rows // TILE_ROWS)

    @property
    def padded_rows(self) -> int:
        """Rows that the tiles hold."""
        return self.num_tiles * TILE_ROWS

    @property
    def num_groups(self) -> int:
        """Groups of a row as stored: those of whole units, so that each unit's groups exist. 0 without scales."""
        if not self.has_scales:
            return 0
        if self.group_size is None:
            return 1
        if self.group_size <= self.unit_inputs:
            return self.num_units * (self.unit_inputs // self.group_size)
        return -(-self.num_units * self.unit_inputs // self.group_size)

    @property
    def tiles_bytes(self) -> int:
        """Bytes of the weights or codes."""
        return self.num_tiles * self.num_units * UNIT_BYTES

    @property
    def scale_rows(self) -> int:
        """Rows that share a scale of a group."""
        return HALF_ROWS if self.scale_type == BLOCK_SCALE else 1

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales."""
        itemsize = SCALE_DTYPES[self.scale_type].itemsize if self.scale_type else 0
        return self.padded_rows // self.scale_rows * self.num_groups * itemsize

    @property
    def zero_points_bytes(self) -> int:
        """Bytes of the zero points."""
        return 0 if self.is_symmetric else self.padded_rows * self.num_groups

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the matrix reads."""
        return self.tiles_bytes + self.scales_bytes + self.zero_points_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of the matrix in an arena: every array rounded up to ALIGNMENT."""
        return sum(map(aligned, (self.tiles_bytes, self.scales_bytes, self.zero_points_bytes)))

    def place(self, memory: Any) -> "TiledMatrix":
        """The matrix over the first `arena_bytes` of `memory`, whose contents stay.

        Shapes: memory uint8 [at least arena_bytes], its address a multiple of ALIGNMENT; a CuPy or NumPy array
        Raises: ValueError if it is too small
        """
        if memory.nbytes < self.arena_bytes:
            raise ValueError(f"{memory.nbytes} bytes cannot hold a matrix of {self.arena_bytes}")
        first = aligned(self.tiles_bytes)
        second = first + aligned(self.scales_bytes)
        shape = (self.num_tiles, self.num_groups, TILE_ROWS)
        scales = zero_points = None
        if self.scale_type is not None:
            scales = memory[first : first + self.scales_bytes].view(SCALE_DTYPES[self.scale_type])
            scales = scales.reshape(*shape[:2], TILE_ROWS // self.scale_rows)
        if not self.is_symmetric:
            zero_points = memory[second : second + self.zero_points_bytes].reshape(shape)
        tiles = memory[: self.tiles_bytes].reshape(self.num_tiles, self.num_units, UNIT_BYTES)
        return TiledMatrix(self, tiles, scales, zero_points)


# How kernels widen weights to fp16: see common/wide_weights.cuh.
Widening = Literal["floats", "halves", "lifted"]
WIDENINGS: tuple[Widening, ...] = ("floats", "halves", "lifted")
_LIFTED_SPAN = 128  # inputs that have one scale, where codes are lifted
_LIFT = 24  # a code is 2^24 times smaller as an fp16's bits
_LARGEST_LIFTED = -8  # scales over the matrix's power of two are below 2 to this


def fastest_widening(layout: TileLayout) -> Widening:
    """The fastest way to widen such weights to fp16. `halves` is one only if fp16 has all scales."""
    if layout.scale_type not in _HALF_TYPES:
        return "floats"
    has_span_scales = layout.group_size is None or layout.group_size >= _LIFTED_SPAN
    return "lifted" if layout.has_codes and layout.is_symmetric and has_span_scales else "halves"


def scale_c_type(layout: TileLayout, widening: Widening) -> str:
    """The type of the scales in kernels."""
    return "LiftedScale" if widening == "lifted" else SCALE_C_TYPES[layout.scale_type or "float32"]


def lifted(scales: np.ndarray, power: int) -> np.ndarray:
    """Scales as kernels take them of lifted codes: float16, in pairs of the rows g and g + 8.

    Shapes: scales float64 [num_tiles, num_groups, 16]; result float16, alike
    """
    pairs = scales.reshape(*scales.shape[:2], 2, HALF_ROWS).swapaxes(2, 3)
    return np.asarray(np.ldexp(pairs, _LIFT - power).astype(np.float16).reshape(scales.shape))


def power_of(largest_scale: float) -> int:
    """The exponent of the power of two that lifted weights are divided by."""
    return math.frexp(largest_scale)[1] - _LARGEST_LIFTED if largest_scale > 0 else 0


@dataclass(frozen=True)
class TiledMatrix:
    """One matrix on the card.

    `widening` is the fastest that its scales allow. Lifted weights are divided by 2 to the `power`.

    Shapes: tiles uint8 [num_tiles, num_units, 1024]; scales [num_tiles, num_groups, 16] in the stored type (bfloat16 as
            uint16), those of blocks [num_tiles, num_groups, 2], or None; zero_points uint8 [num_tiles, num_groups, 16],
            or None for a symmetric scheme
    """

    layout: TileLayout
    tiles: Any
    scales: Any | None
    zero_points: Any | None
    widening: Widening = "floats"
    power: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the matrix reads."""
        return self.layout.num_bytes

    @property
    def unlift(self) -> float:
        """What makes scales of lifted ones."""
        return 2.0 ** (self.power - _LIFT) if self.widening == "lifted" else 1.0


def stored_group_size(weight_type: str, group_size: int | None, num_inputs: int, has_row_scale: bool) -> int | None:
    """The group size that kernels see: a power of two that divides `group_size`, whose scales are then repeated.

    None means one scale a row. If a row has none (`has_row_scale`), one group a row becomes a group that holds it.
    Raises: ValueError for groups too small to lie in a unit
    """
    if group_size is None or group_size >= num_inputs:
        return None if has_row_scale else max(_power_of_two_from(num_inputs), _span_inputs(weight_type))
    power = group_size & -group_size
    smallest = _unit_inputs(weight_type) // _MAX_GROUPS_PER_UNIT
    if weight_type == "fp8":  # its groups are whole spans
        smallest = _span_inputs(weight_type)
    if power < smallest:
        raise ValueError(f"groups of {group_size} {weight_type} weights; a multiple of {smallest} is needed")
    return power


@cache
def tile_layout(
    weight_type: str,
    num_rows: int,
    num_inputs: int,
    group_size: int | None = None,
    scale_type: str | None = None,
    is_symmetric: bool = True,
) -> TileLayout:
    """The layout of a matrix, from the checkpoint's group size; equal matrices share one.

    Raises: ValueError for groups too small to lie in a unit
    """
    if weight_type in _SCALED:
        has_row_scale = _has_row_scale(is_symmetric, scale_type)
        group_size = stored_group_size(weight_type, group_size, num_inputs, has_row_scale)
    return TileLayout(weight_type, num_rows, num_inputs, group_size, scale_type, is_symmetric)


def _has_row_scale(is_symmetric: bool, scale_type: str | None) -> bool:
    """Whether a row of one group can be scaled after the product: not with zero points, or where rows share a scale."""
    return is_symmetric and scale_type != BLOCK_SCALE


def aligned(num_bytes: int) -> int:
    """Round up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _unit_inputs(weight_type: str) -> int:
    return _UNIT_ROW_BYTES * 8 // WEIGHT_BITS[weight_type]


def _span_inputs(weight_type: str) -> int:
    return _unit_inputs(weight_type) * SPAN_UNITS[weight_type]


def _power_of_two_from(count: int) -> int:
    return 1 << (count - 1).bit_length()
