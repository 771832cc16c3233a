"""Multiplies many tokens with a matrix. The matrix and the number of tokens decide which kernels do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.cublas import Cublas
from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_packed import gemm_packed, takes
from llmcli.kernels.tiles import TILE_ROWS, TileLayout
from llmcli.runners.cuda.ways import Way
from llmcli.runners.cuda.weight_layout import Projection
from llmcli.runners.cuda.workspace import tiles_at_a_time


@dataclass(frozen=True)
class _Piece:
    """Some tiles of a matrix: its rows `begin` ... `end` - 1. They are widened into `tiles`.

    Shapes: tiles [16 * num_tiles, num_inputs]; rows [end - begin, num_inputs], the same without padding
    """

    first_tile: int
    num_tiles: int
    begin: int
    end: int
    tiles: Any
    rows: Any


class Products:
    """Computes x @ W.T with float32 results. It widens weights into `widened` (uint8), some tiles at a time."""

    def __init__(self, device: Device, library: Cublas, widened: Any):
        self._device = device
        self._library = library
        self._widened = widened
        self._pieces: dict[tuple[TileLayout, np.dtype[Any]], list[_Piece]] = {}

    def multiply(self, projection: Projection[Any], x: Any, out: Any, way: Way) -> None:
        """Write the product, without row scales and bias.

        Shapes: x [num_tokens, num_inputs] in the projection's activation_dtype; out float32 [num_tokens, num_rows],
                rows may be further apart
        """
        matrix, layout = projection.matrix, projection.layout
        if way == "packed" and takes(layout):
            gemm_packed(self._device, matrix=matrix, x=x, out=out)
            return
        pieces = self._pieces_of(layout, x.dtype)
        for piece in pieces:
            first_tile, num_tiles = piece.first_tile, piece.num_tiles
            dequantize(self._device, matrix=matrix, first_tile=first_tile, num_tiles=num_tiles, out=piece.tiles)
            columns = out if len(pieces) == 1 else out[:, piece.begin : piece.end]
            self._library.matmul(x=x, weight=piece.rows, out=columns)

    def _pieces_of(self, layout: TileLayout, dtype: np.dtype[Any]) -> list[_Piece]:
        """The pieces in which a matrix is widened, cached: cutting them takes the host longer than launching them."""
        pieces = self._pieces.get((layout, dtype))
        if pieces is None:
            step = tiles_at_a_time(layout, dtype.itemsize, self._widened.size)
            pieces = [self._piece(layout, dtype, first, step) for first in range(0, layout.num_tiles, step)]
            self._pieces[layout, dtype] = pieces
        return pieces

    def _piece(self, layout: TileLayout, dtype: np.dtype[Any], first_tile: int, most: int) -> _Piece:
        num_tiles = min(most, layout.num_tiles - first_tile)
        size = num_tiles * TILE_ROWS * layout.num_inputs * dtype.itemsize
        tiles = self._widened[:size].view(dtype).reshape(-1, layout.num_inputs)
        begin, end = first_tile * TILE_ROWS, min((first_tile + num_tiles) * TILE_ROWS, layout.num_rows)
        return _Piece(first_tile, num_tiles, begin, end, tiles, tiles[: end - begin])
