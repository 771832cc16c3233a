"""Matrices of the lab on a card."""

from dataclasses import replace
from typing import Any

from llmcli.kernels.tiles import TiledMatrix


def upload(matrix: TiledMatrix) -> TiledMatrix:
    """The same matrix on the card."""
    import cupy

    def copy(array: Any) -> Any:
        return None if array is None else cupy.asarray(array)

    arrays = {name: copy(getattr(matrix, name)) for name in ("tiles", "scales", "zero_points")}
    return replace(matrix, **arrays)
