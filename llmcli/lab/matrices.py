"""Matrices for cases of kernels: as checkpoints store them, as tiles by a NumPy reference, and exactly in float64."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels import tiles
from llmcli.kernels.repack import NOT_HALF, widening_of
from llmcli.lab.problem import Arrays, stored_values
from llmcli.quantization.rounding import E4M3_VALUES, pack_rows, pack_zero_points

# Values as arrays store them: float32, float16, and bfloat16 in uint16.

STORAGE: tuple[Any, ...] = (np.float32, np.float16, np.uint16)
STORAGE_NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite values rounded to nearest even bfloat16, as uint16."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_storage(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values rounded to a storage type; uint16 means bfloat16."""
    return to_bfloat16(values) if np.dtype(dtype) == np.uint16 else values.astype(dtype)


def storage_name(dtype: Any) -> str:
    """The name of a storage type."""
    return STORAGE_NAMES[np.dtype(dtype)]


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class StoredMatrix:
    """One weight as in a checkpoint: `values` [num_rows, num_inputs] are codes uint8, or floats as stored."""

    weight_type: str
    values: np.ndarray
    group_size: int | None = None
    scale_type: str | None = None
    scales: np.ndarray | None = None  # [num_rows, groups]; of blocks a row for each half tile
    zero_points: np.ndarray | None = None  # uint8 [num_rows, groups]

    @property
    def name(self) -> str:
        """Its format in words."""
        parts = [self.weight_type]
        if self.scales is not None:
            parts += [str(self.scale_type), f"groups of {self.group_size}" if self.group_size else "one scale a row"]
            parts += [] if self.zero_points is None else ["zero points"]
        return ", ".join(parts)

    @property
    def layout(self) -> tiles.TileLayout:
        """Its tiles on a card."""
        rows, inputs = self.values.shape
        is_symmetric = self.zero_points is None
        return tiles.tile_layout(self.weight_type, rows, inputs, self.group_size, self.scale_type, is_symmetric)

    @property
    def widening(self) -> tiles.Widening:
        """The fastest way to widen it that its scales allow, as loading finds it."""
        if self.scales is None:
            return "floats"
        sizes = np.abs(stored_values(self.scales))
        is_outside = ((sizes < 2.0**-17) | (sizes > 65504)) & (sizes > 0)
        return widening_of(self.layout, NOT_HALF * bool(self.scale_type != "float16" and is_outside.any()))

    @property
    def power(self) -> int:
        """The exponent that lifted weights are divided by."""
        if self.scales is None or self.widening != "lifted":
            return 0
        return tiles.power_of(float(np.abs(stored_values(self.scales)).max()))

    @property
    def halves(self) -> np.ndarray:
        """The weights as they are multiplied: rounded to fp16, exactly. Shapes: float64 [num_rows, num_inputs]"""
        if self.widening != "lifted":
            return self.weights.astype(np.float32).astype(np.float16).astype(np.float64)
        assert self.scales is not None
        # As widen_lifted of common/wide_weights.cuh: a code's bits times a lifted scale, less that of the code of zero.
        inputs = self.values.shape[1]
        group = np.arange(inputs) // (self.group_size or inputs)
        lifted_scales = _in_half(np.ldexp(stored_values(self.scales), 24 - self.power))[:, group]
        less = _in_half(np.ldexp(lifted_scales, tiles.WEIGHT_BITS[self.weight_type] - 1 - 24))
        values: np.ndarray = np.ldexp(
            _in_half(np.ldexp(self.values.astype(np.float64), -24) * lifted_scales - less), self.power
        )
        return values

    @property
    def source(self) -> np.ndarray:
        """The tensor's bytes as on disk."""
        if self.scales is None:
            return np.ascontiguousarray(self.values).view(np.uint8).reshape(-1)
        if self.weight_type == "fp8":
            return np.ascontiguousarray(self.values).reshape(-1)
        return pack_rows(self.values, tiles.WEIGHT_BITS[self.weight_type]).view(np.uint8).reshape(-1)

    @property
    def packed_zero_points(self) -> np.ndarray:
        """The zero points as on disk."""
        assert self.zero_points is not None
        return pack_zero_points(self.zero_points, tiles.WEIGHT_BITS[self.weight_type])

    @property
    def weights(self) -> np.ndarray:
        """The exact weights, float64 [num_rows, num_inputs]."""
        if self.scales is None:
            return stored_values(self.values)
        inputs = self.values.shape[1]
        group = np.arange(inputs) // (self.group_size or inputs)
        if self.weight_type == "fp8":
            scales = stored_values(self.scales).repeat(self.layout.scale_rows, axis=0)[: len(self.values)]
            return np.asarray(E4M3_VALUES[self.values].astype(np.float64) * scales[:, group])
        zeros = (
            1 << (tiles.WEIGHT_BITS[self.weight_type] - 1) if self.zero_points is None else self.zero_points[:, group]
        )
        return np.asarray((self.values.astype(np.float64) - zeros) * stored_values(self.scales)[:, group])


def _in_half(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.astype(np.float16).astype(np.float64))


def random_matrix(
    seed: int,
    weight_type: str,
    num_rows: int,
    num_inputs: int,
    group_size: int | None = None,
    scale_type: str = "float32",
    is_symmetric: bool = True,
) -> StoredMatrix:
    """Codes of the whole range, both ends included, or normal floats; scales of many sizes."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_inputs)
    if weight_type in DTYPES:
        return StoredMatrix(weight_type, to_storage(rng.standard_normal(shape), DTYPES[weight_type]))
    top = (1 << tiles.WEIGHT_BITS[weight_type]) - 1
    codes = rng.integers(0, top + 1, shape, dtype=np.uint8)
    codes[:, 0], codes[:, -1] = top, 1
    if weight_type == "fp8":
        codes[codes & 0x7F == 0x7F] = 0x7E  # NaN becomes the largest number
    groups = -(-num_inputs // (group_size or num_inputs))
    num_scales = -(-num_rows // tiles.HALF_ROWS) if scale_type == tiles.BLOCK_SCALE else num_rows
    scales = to_storage(2.0 ** rng.uniform(-9, -3, (num_scales, groups)), tiles.SCALE_DTYPES[scale_type])
    zeros = None if is_symmetric else rng.integers(0, top + 1, (num_rows, groups), dtype=np.uint8)
    return StoredMatrix(weight_type, codes, group_size, scale_type, scales, zeros)


def tiles_of(stored: StoredMatrix) -> tiles.TiledMatrix:
    """The tiles by NumPy, on the host."""
    layout = stored.layout
    matrix = replace(layout.place(aligned_zeros(layout.arena_bytes)), widening=stored.widening, power=stored.power)
    matrix.tiles[...] = tile_rows(layout, stored.values).reshape(matrix.tiles.shape)
    if matrix.scales is not None:
        assert stored.scales is not None
        scales = _grouped(layout, stored, stored.scales, layout.scale_rows)
        if stored.widening == "lifted":
            scales = tiles.lifted(stored_values(scales), stored.power).view(matrix.scales.dtype)
        matrix.scales[...] = scales
    if matrix.zero_points is not None:
        assert stored.zero_points is not None
        matrix.zero_points[...] = _grouped(layout, stored, stored.zero_points)
    return matrix


def arrays_of(matrix: tiles.TiledMatrix) -> dict[str, np.ndarray]:
    """The arrays of a matrix by name, as a problem's inputs."""
    given = {"tiles": matrix.tiles, "scales": matrix.scales, "zero_points": matrix.zero_points}
    return {name: array for name, array in given.items() if array is not None}


def matrix_of(layout: tiles.TileLayout, arrays: Arrays, like: StoredMatrix | None = None) -> tiles.TiledMatrix:
    """The matrix of a problem's arrays, widened as that of `like`."""
    matrix = tiles.TiledMatrix(layout, arrays["tiles"], arrays.get("scales"), arrays.get("zero_points"))
    return matrix if like is None else replace(matrix, widening=like.widening, power=like.power)


def aligned_zeros(num_bytes: int) -> np.ndarray:
    """Host memory whose address has an arena's alignment."""
    memory = np.zeros(num_bytes + tiles.ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % tiles.ALIGNMENT
    return memory[begin : begin + num_bytes]


def _grouped(layout: tiles.TileLayout, stored: StoredMatrix, values: np.ndarray, rows: int = 1) -> np.ndarray:
    """[num_rows / rows, source groups] as [tile][stored group][16 / rows]."""
    result = np.zeros((layout.padded_rows // rows, layout.num_groups), values.dtype)
    for group in range(layout.num_groups):
        first_input = group * (layout.group_size or 0)
        source_group = first_input // (stored.group_size or layout.num_units * layout.unit_inputs)
        if source_group < values.shape[1]:
            result[: len(values), group] = values[:, source_group]
    return result.reshape(layout.num_tiles, tiles.TILE_ROWS // rows, layout.num_groups).transpose(0, 2, 1)


# Weights in the engine's tiles, made on the host, so that a problem's inputs include them.

_ROW_BYTES = tiles.UNIT_BYTES // tiles.TILE_ROWS  # of a unit
_LANE_BYTES = 16
_ZERO_CODE = 0x80  # of int8, where a tile has no weight


def tile_rows(layout: tiles.TileLayout, weights: np.ndarray) -> np.ndarray:
    """The tiles of a matrix of codes (as uint8) or of floats; see kernels/common/tile.cuh.

    Shapes: weights [num_rows, num_inputs]; the result uint8 [num_tiles, num_units, 1024]
    """
    if layout.weight_type == "int4":
        codes = np.full((layout.padded_rows, layout.num_units * layout.unit_inputs), 8, np.uint8)
        codes[: layout.num_rows, : layout.num_inputs] = weights
        # A word of eight has the inputs 0 2 4 6 1 3 5 7.
        ordered = codes.reshape(len(codes), -1, 4, 2).transpose(0, 1, 3, 2).reshape(codes.shape)
        padded: np.ndarray = ordered[:, ::2] | ordered[:, 1::2] << 4
    else:
        rows = np.ascontiguousarray(weights).view(np.uint8).reshape(layout.num_rows, -1)
        filler = _ZERO_CODE if layout.has_codes else 0
        padded = np.full((layout.padded_rows, layout.num_units * _ROW_BYTES), filler, np.uint8)
        padded[: rows.shape[0], : rows.shape[1]] = rows
    shape = (layout.num_tiles, 2, tiles.HALF_ROWS, layout.num_units, _ROW_BYTES // _LANE_BYTES, _LANE_BYTES)
    # [tile][v][g][unit][t][byte] -> [tile][unit][v][g][t][byte]
    ordered_tiles = padded.reshape(shape).transpose(0, 3, 1, 2, 4, 5)
    return np.ascontiguousarray(ordered_tiles).reshape(layout.num_tiles, layout.num_units, tiles.UNIT_BYTES)
