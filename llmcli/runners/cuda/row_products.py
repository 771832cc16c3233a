"""Multiplies the rows of decoding lanes with a matrix. Number of rows, matrix and card decide which kernels do it.

All of these kernels give a row the same bits, so its bits do not depend on how many rows run with it.
"""

from __future__ import annotations

import itertools
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
    """Whether `num_rows` rows are staged: more than one gemv takes, weights of 16 bits or fewer, a card with wgmma."""
    return card.can_wgmma and num_rows > MAX_ROWS and (takes_codes(layout) or takes_halves(layout))


def staged_bytes(card: CardFacts, products: Iterable[tuple[TileLayout, int]]) -> int:
    """Bytes for the rows of each of these products, one at a time; each is a matrix and its largest number of rows."""
    return max(
        (_image_bytes(layout, num_rows) for layout, num_rows in products if stages_rows(card, layout, num_rows)),
        default=0,
    )


class RowProducts:
    """Computes f(x' @ W.T + bias) for any number of rows up to the number of lanes.

    `staged` and `norm_factors` are memory for staged rows. Without it rows are multiplied eight at a time.
    Shapes: staged uint8 [staged_bytes]; norm_factors float32 [most rows]
    """

    def __init__(self, device: Device, staged: Any | None, norm_factors: Any | None):
        self.device = device
        self.staged = staged
        self.norm_factors = norm_factors
        self.standing: tuple[int, str, bool] | None = None  # which input is in `staged`, in which format
        self._numbers = itertools.count()

    def inputs(self, x: Any, norm_weight: Any | None = None, eps: float = 0.0) -> RowInputs:
        """Rows to multiply with one or several matrices.

        Shapes: x float32 [num_rows, num_inputs], rows any distance apart; norm_weight float32 [num_inputs]
        """
        return RowInputs(self, next(self._numbers), x, norm_weight, eps)


class RowInputs:
    """Rows of activations, normed or not. Matrices that take them in one format share it. Made by `RowProducts`."""

    def __init__(self, products: RowProducts, number: int, x: Any, norm_weight: Any | None, eps: float):
        self._products = products
        self._number = number
        self._x = x
        self._norm_weight = norm_weight
        self._eps = eps

    def multiply(self, matrix: TiledMatrix, out: Any, *, bias: Any | None = None, epilogue: Epilogue = "store") -> None:
        """Write the product, or add it; `out`, `bias` and `epilogue` as in gemv."""
        layout, num_rows, products = matrix.layout, len(self._x), self._products
        device, image = products.device, products.staged
        if image is None or not stages_rows(device, layout, num_rows):
            gemv(
                device,
                matrix=matrix,
                x=self._x,
                out=out,
                norm_weight=self._norm_weight,
                eps=self._eps,
                bias=bias,
                epilogue=epilogue,
            )
            return
        assert products.norm_factors is not None
        factors = products.norm_factors[:num_rows]
        standing = self._number, layout.weight_type, layout.is_symmetric
        if products.standing != standing:
            (stage_digits if layout.has_codes else stage_halves)(
                device,
                layout=layout,
                x=self._x,
                image=image,
                factors=factors,
                norm_weight=self._norm_weight,
                eps=self._eps,
            )
            products.standing = standing
        (gemm_codes if layout.has_codes else gemm_halves)(
            device, matrix=matrix, image=image, factors=factors, out=out, bias=bias, epilogue=epilogue
        )


def _image_bytes(layout: TileLayout, num_rows: int) -> int:
    return digits_bytes(layout, num_rows) if layout.has_codes else halves_bytes(layout, num_rows)
