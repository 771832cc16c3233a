"""Multiplies the rows of decoding lanes with a matrix. Their number, matrix and card decide which kernels do it.

All ways give a row the same bits, so they do not depend on how many rows run beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_codes import gemm_codes
from llmcli.kernels.gemm_codes import takes as takes_codes
from llmcli.kernels.gemm_halves import gemm_halves
from llmcli.kernels.gemm_halves import takes as takes_halves
from llmcli.kernels.gemv import MAX_ROWS, Epilogue, gemv
from llmcli.kernels.stage_digits import image_bytes as digits_bytes
from llmcli.kernels.stage_digits import stage_digits
from llmcli.kernels.stage_halves import image_bytes as halves_bytes
from llmcli.kernels.stage_halves import stage_halves
from llmcli.kernels.tiles import TiledMatrix, TileLayout


def stages_rows(card: CardFacts | Device, layout: TileLayout, num_rows: int) -> bool:
    """Whether so many rows are staged: more than one gemv serves, weights of 16 bits or fewer, a card with wgmma."""
    return card.can_wgmma and num_rows > MAX_ROWS and (takes_codes(layout) or takes_halves(layout))


def staged_bytes(card: CardFacts, products: Iterable[tuple[TileLayout, int]]) -> int:
    """Bytes for the rows of each of these products, one at a time: a matrix, and the most rows that it multiplies."""
    return max(
        (_image_bytes(layout, num_rows) for layout, num_rows in products if stages_rows(card, layout, num_rows)),
        default=0,
    )


class RowProducts:
    """Computes f(x' @ W.T + bias) for a few rows up to those of all lanes.

    `staged` and `norm_factors` are memory for staged rows. Without it any number of rows go eight at a time.
    Shapes: staged uint8 [staged_bytes]; norm_factors float32 [most rows]
    """

    def __init__(self, device: Device, staged: Any | None, norm_factors: Any | None):
        self._device = device
        self._staged = staged
        self._norm_factors = norm_factors

    def inputs(self, x: Any, norm_weight: Any | None = None, eps: float = 0.0) -> RowInputs:
        """Rows to be multiplied with one matrix or several, one after the other and nothing else between.

        Shapes: x float32 [num_rows, num_inputs], rows any distance apart; norm_weight float32 [num_inputs]
        """
        return RowInputs(self._device, self._staged, self._norm_factors, x, norm_weight, eps)


class RowInputs:
    """Rows of activations, normed or not. Matrices that take them in one form share it. Made by `RowProducts`."""

    def __init__(
        self, device: Device, staged: Any | None, norm_factors: Any | None, x: Any, norm_weight: Any | None, eps: float
    ):
        self._device = device
        self._staged = staged
        self._norm_factors = norm_factors
        self._x = x
        self._norm_weight = norm_weight
        self._eps = eps
        self._form: tuple[str, bool] | None = None  # in which the rows stand in `staged`

    def multiply(self, matrix: TiledMatrix, out: Any, *, bias: Any | None = None, epilogue: Epilogue = "store") -> None:
        """Write the product, or add it; `out`, `bias` and `epilogue` as in gemv."""
        layout, num_rows = matrix.layout, len(self._x)
        if self._staged is None or not stages_rows(self._device, layout, num_rows):
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
        image, factors = self._staged, self._norm_factors[:num_rows]
        form = layout.weight_type, layout.is_symmetric
        if self._form != form:
            (stage_digits if layout.has_codes else stage_halves)(
                self._device,
                layout=layout,
                x=self._x,
                image=image,
                factors=factors,
                norm_weight=self._norm_weight,
                eps=self._eps,
            )
            self._form = form
        (gemm_codes if layout.has_codes else gemm_halves)(
            self._device, matrix=matrix, image=image, factors=factors, out=out, bias=bias, epilogue=epilogue
        )


def _image_bytes(layout: TileLayout, num_rows: int) -> int:
    return digits_bytes(layout, num_rows) if layout.has_codes else halves_bytes(layout, num_rows)
