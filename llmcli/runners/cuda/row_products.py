"""Multiplies the rows of decoding lanes with a matrix. Their number, matrix and card decide which kernels do it.

All ways give a row the same bits, so they do not depend on how many rows run beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_codes import gemm_codes, takes
from llmcli.kernels.gemv import MAX_ROWS, Epilogue, gemv
from llmcli.kernels.stage_digits import image_bytes, stage_digits
from llmcli.kernels.tiles import TiledMatrix, TileLayout


def multiplies_digits(card: CardFacts | Device, layout: TileLayout, num_rows: int) -> bool:
    """Whether so many rows become digits: more than one gemv serves, a matrix of codes, and a card with wgmma."""
    return card.can_wgmma and num_rows > MAX_ROWS and takes(layout)


def digits_bytes(card: CardFacts, products: Iterable[tuple[TileLayout, int]]) -> int:
    """Bytes for the digits of each of these products, one at a time: a matrix, and the most rows that it multiplies."""
    return max(
        (image_bytes(layout, num_rows) for layout, num_rows in products if multiplies_digits(card, layout, num_rows)),
        default=0,
    )


class RowProducts:
    """Computes f(x' @ W.T + bias) for a few rows up to those of all lanes.

    `digits` and `norm_factors` are memory for rows as digits. Without it any number of rows go eight at a time.
    Shapes: digits uint8 [digits_bytes]; norm_factors float32 [most rows]
    """

    def __init__(self, device: Device, digits: Any | None, norm_factors: Any | None):
        self._device = device
        self._digits = digits
        self._norm_factors = norm_factors

    def inputs(self, x: Any, norm_weight: Any | None = None, eps: float = 0.0) -> RowInputs:
        """Rows to be multiplied with one matrix or several, one after the other and nothing else between.

        Shapes: x float32 [num_rows, num_inputs], rows any distance apart; norm_weight float32 [num_inputs]
        """
        return RowInputs(self._device, self._digits, self._norm_factors, x, norm_weight, eps)


class RowInputs:
    """Rows of activations, normed or not. Matrices that take the same digits share them. Made by `RowProducts`."""

    def __init__(
        self, device: Device, digits: Any | None, norm_factors: Any | None, x: Any, norm_weight: Any | None, eps: float
    ):
        self._device = device
        self._digits = digits
        self._norm_factors = norm_factors
        self._x = x
        self._norm_weight = norm_weight
        self._eps = eps
        self._staged: tuple[str, bool] | None = None  # the form of the digits that stand

    def multiply(self, matrix: TiledMatrix, out: Any, *, bias: Any | None = None, epilogue: Epilogue = "store") -> None:
        """Write the product, or add it; `out`, `bias` and `epilogue` as in gemv."""
        layout, num_rows = matrix.layout, len(self._x)
        if self._digits is None or not multiplies_digits(self._device, layout, num_rows):
            gemv(
                self._device,
                matrix=matrix,
                x=self._x,
                out=out,
                norm_weight=self._norm_weight,
                eps=self._eps,
                bias=bias,
                epilogue=epilogue,
            )
            return
        assert self._norm_factors is not None
        digits, factors = self._digits, self._norm_factors[:num_rows]
        form = layout.weight_type, layout.is_symmetric
        if self._staged != form:
            stage_digits(
                self._device,
                layout=layout,
                x=self._x,
                image=digits,
                factors=factors,
                norm_weight=self._norm_weight,
                eps=self._eps,
            )
            self._staged = form
        gemm_codes(self._device, matrix=matrix, image=digits, factors=factors, out=out, bias=bias, epilogue=epilogue)
