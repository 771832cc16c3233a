"""Matrices of int8 codes for the problems of a decode step: rows of codes, the engine's tiles, products in float64."""

from dataclasses import dataclass

import numpy as np

from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout
from llmcli.lab.matrices import tile_rows
from llmcli.lab.problem import Arrays
from llmcli.lab.problems.gemv_codes import by_tile, input_error, sum_error

_ROUNDING = 2.0**-24
_ZERO_CODE = 128


@dataclass(frozen=True)
class Codes:
    """A matrix (codes - 128) * scales. Shapes: codes uint8 [num_rows, num_inputs]; scales float32 [num_rows]"""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def layout(self) -> TileLayout:
        """The layout of its tiles on a card."""
        return tile_layout("int8", *self.codes.shape, None, "float32")

    @property
    def weights(self) -> np.ndarray:
        """The exact weights, float32 [num_rows, num_inputs]."""
        return np.asarray((self.codes.astype(np.float32) - _ZERO_CODE) * self.scales[:, np.newaxis])

    def product(self, x: np.ndarray, x_bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The product with x and its bound, where x itself may be off by x_bound."""
        weights = self.weights.astype(np.float64)
        sizes = np.abs(weights)
        rounded = (np.sqrt(x.size) + 8) * _ROUNDING * (sizes @ np.abs(x))
        return weights @ x, rounded + sum_error(sizes, input_error(x, self.layout) + x_bound)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Codes and scales, as a problem's inputs."""
        return {f"{name}_codes": self.codes, f"{name}_scales": self.scales}

    def tiled(self, name: str) -> dict[str, np.ndarray]:
        """The same in tiles, as a problem's inputs."""
        layout = self.layout
        return {f"{name}_tiles": tile_rows(layout, self.codes), f"{name}_tile_scales": by_tile(layout, self.scales)}


def random_codes(generator: np.random.Generator, num_rows: int, num_inputs: int) -> Codes:
    """Codes of all sizes, whose products with numbers of size 1 have about that size; scales are powers of two."""
    codes = generator.integers(1, 256, (num_rows, num_inputs), dtype=np.uint8)
    exponent = -round(float(np.log2(74 * np.sqrt(num_inputs))))
    scales = np.ldexp(np.float32(1), generator.integers(exponent - 1, exponent + 1, num_rows))
    return Codes(codes, scales.astype(np.float32))


def matrix_of(layout: TileLayout, arrays: Arrays, name: str) -> TiledMatrix:
    """The tiles of `Codes.tiled` on a card."""
    return TiledMatrix(layout, arrays[f"{name}_tiles"], arrays[f"{name}_tile_scales"], None)


def rms_normed(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """weight * x / sqrt(mean(x^2) + eps) of one row in float64, and its bound. Shapes: all [num_columns]"""
    wide = x.astype(np.float64)
    normed = weight * wide / np.sqrt(np.mean(wide**2) + np.float64(eps))
    # Half of the error of the sum of squares, then as rms_norm.
    return normed, (np.sqrt(x.size) / 2 + 8) * _ROUNDING * np.abs(normed)
