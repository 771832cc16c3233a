"""Activations as two 8-bit digits by NumPy, in the order of kernels/common/digit_image.cuh."""

from dataclasses import dataclass

import numpy as np

from llmcli.kernels.stage_digits import tokens_of
from llmcli.kernels.tiles import TileLayout

MOST = 32639  # 127 * 256 + 127: what the largest magnitude in a span becomes


@dataclass(frozen=True)
class Digits:
    """Rows as integers. A number is its integer times the scale of its span, as the kernels' float32 arithmetic has it.

    Shapes: integers int64 [num_rows, num_spans, span_inputs], padded with zeros; scales float32 [num_rows, num_spans]
    """

    layout: TileLayout
    integers: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What the rows have become, float64 [num_rows, num_inputs]."""
        values = self.integers * (self.scales.astype(np.float64) / _code_unit(self.layout))[:, :, None]
        return np.asarray(values.reshape(len(values), -1)[:, : self.layout.num_inputs])

    def image(self, unused: int) -> np.ndarray:
        """The bytes as gemm_codes reads them; those of rows that do not exist are `unused`. Shapes: uint8, flat."""
        layout, num_rows = self.layout, len(self.integers)
        tokens = tokens_of(layout, num_rows)
        blocks = -(-num_rows // tokens)
        num_pieces = layout.span_inputs // 16
        high = (self.integers + 128) >> 8
        both = np.stack((high, self.integers - 256 * high), axis=2).astype(np.int8)  # [row, span, digit, input]
        parts = [
            both[..., _input_order(layout)].reshape(num_rows, layout.num_spans, 2 * num_pieces, 16).view(np.uint8),
            self.scales.view(np.uint8).reshape(num_rows, layout.num_spans, 1, 4),
        ]
        if not layout.is_symmetric:
            sums = self.integers.sum(axis=2).astype(np.int32)
            parts.append(sums.view(np.uint8).reshape(num_rows, layout.num_spans, 1, 4))
        laid = []
        for part in parts:
            padded = np.full((blocks * tokens, *part.shape[1:]), unused, np.uint8)
            padded[:num_rows] = part
            # [block, token, span, piece, bytes] -> [block, span, piece, token, bytes]
            split = padded.reshape(blocks, tokens, *part.shape[1:]).transpose(0, 2, 3, 1, 4)
            laid.append(split.reshape(blocks, layout.num_spans, -1))
        return np.ascontiguousarray(np.concatenate(laid, axis=2)).reshape(-1)


def digits_of(layout: TileLayout, values: np.ndarray) -> Digits:
    """The digits of rows, already times the norm's weights. Shapes: values float32 [num_rows, num_inputs]"""
    units = _units(layout, values)
    bounds = _bounds(units)
    integers = np.rint(units.astype(np.float64) * (MOST / bounds.astype(np.float64))[:, :, None]).astype(np.int64)
    return Digits(layout, integers, bounds * np.float32(_code_unit(layout) / MOST))


def far_from_halves(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """Where rounding to an integer is certain, whatever the last bits of the quotient. Shapes: bool as values."""
    units = _units(layout, values)
    quotients = units.astype(np.float64) * (MOST / _bounds(units).astype(np.float64))[:, :, None]
    is_far = np.abs(quotients - np.floor(quotients) - 0.5) > 0.02
    return np.asarray(is_far.reshape(len(values), -1)[:, : layout.num_inputs])


def _units(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """Shapes: result float32 [num_rows, num_spans, span_inputs]"""
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % layout.span_inputs)))
    return np.asarray(padded.reshape(len(values), layout.num_spans, layout.span_inputs))


def _bounds(units: np.ndarray) -> np.ndarray:
    """The largest magnitude of each span, or what stands for zero."""
    return np.asarray(np.maximum(np.abs(units).max(axis=2), np.float32(2.0**-100)))


def _code_unit(layout: TileLayout) -> float:
    """Symmetric int4 codes are multiplied as 16 times themselves."""
    return 1 / 16 if layout.weight_type == "int4" and layout.is_symmetric else 1.0


def _input_order(layout: TileLayout) -> np.ndarray:
    """The inputs of a span in the order of [piece][t][4 bytes]."""
    if layout.weight_type == "int8":
        units = [64 * unit + 4 * piece for unit in range(2) for piece in range(4)]
        return np.array([begin + 16 * t + i for begin in units for t in range(4) for i in range(4)])
    # A byte of codes has an even input and the odd one behind it; even ones are multiplied first.
    pieces = [(pair, half, eighth) for pair in range(2) for half in range(2) for eighth in range(2)]
    return np.array(
        [
            8 * (4 * t + 2 * pair + eighth) + 2 * i + half
            for pair, half, eighth in pieces
            for t in range(4)
            for i in range(4)
        ]
    )
