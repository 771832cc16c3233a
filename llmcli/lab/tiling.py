"""Weights in the engine's tiles, made on the host, so that a problem's inputs hold them."""

import numpy as np

from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, UNIT_BYTES, TileLayout

_ROW_BYTES = UNIT_BYTES // TILE_ROWS  # of a unit
_LANE_BYTES = 16
_ZERO_CODE = 0x80  # of int8, where a tile has no weight


def tiles_of(layout: TileLayout, weights: np.ndarray) -> np.ndarray:
    """The tiles of a matrix of int8 codes (as uint8) or of floats, as kernels/common/tile.cuh tells them.

    Shapes: weights [num_rows, num_inputs]; the result uint8 [num_tiles, num_units, 1024]
    """
    rows = np.ascontiguousarray(weights).view(np.uint8).reshape(layout.num_rows, -1)
    filler = _ZERO_CODE if layout.has_codes else 0
    padded = np.full((layout.padded_rows, layout.num_units * _ROW_BYTES), filler, np.uint8)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    shape = (layout.num_tiles, 2, HALF_ROWS, layout.num_units, _ROW_BYTES // _LANE_BYTES, _LANE_BYTES)
    # [tile][v][g][unit][t][byte] -> [tile][unit][v][g][t][byte]
    tiles = padded.reshape(shape).transpose(0, 3, 1, 2, 4, 5)
    return np.ascontiguousarray(tiles).reshape(layout.num_tiles, layout.num_units, UNIT_BYTES)
