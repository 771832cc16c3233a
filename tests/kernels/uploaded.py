"""Matrices of the lab on a card."""

from typing import Any

from llmcli.kernels.tiles import TiledMatrix


def upload(matrix: TiledMatrix) -> TiledMatrix:
    """The same matrix on the card."""
    import cupy

    def copy(array: Any) -> Any:
        return None if array is None else cupy.asarray(array)

    arrays = (copy(matrix.tiles), copy(matrix.scales), copy(matrix.zero_points))
    return TiledMatrix(matrix.layout, *arrays, matrix.widening)
