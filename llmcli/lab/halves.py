"""Activations as pairs of 16-bit numbers by NumPy, in the order of kernels/common/half_image.cuh."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.stage_halves import has_unit_scale, tokens_of
from llmcli.kernels.tiles import TileLayout
from llmcli.lab.matrices import DTYPES
from llmcli.lab.problem import stored_values
from llmcli.lab.storage import to_storage

_TOP = 14  # the largest magnitude of a unit, or of a span for 8-bit floats, is in fp16 in [2^14, 2^15)


@dataclass(frozen=True)
class Halves:
    """Rows as pairs in the weights' type. A number is hi + lo, times the inverse of its unit's scale.

    For 8-bit floats pairs are of fp16, and the units of a span have one scale.
    Shapes: hi, lo uint16 or float16 [num_rows, num_units, unit_inputs], padded with zeros; inverses float32
            [num_rows, num_units], ones for bfloat16
    """

    layout: TileLayout
    hi: np.ndarray
    lo: np.ndarray
    inverses: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What the rows have become, float64 [num_rows, num_inputs]."""
        both = stored_values(self.hi) + stored_values(self.lo)
        values = both * self.inverses.astype(np.float64)[:, :, None]
        return np.asarray(values.reshape(len(values), -1)[:, : self.layout.num_inputs])

    def image(self, unused: int) -> np.ndarray:
        """The bytes as gemm_halves reads them; those of rows that do not exist are `unused`. Shapes: uint8, flat."""
        num_rows, num_units = self.inverses.shape
        tokens, lane_parts = tokens_of(self.layout, num_rows), self.layout.unit_inputs // 32
        blocks = -(-num_rows // tokens)
        # Lane t has eight inputs in each part, two of them in each piece: [row, unit, t, part, piece, 4 bytes] of both.
        lanes = [half.view(np.uint8).reshape(num_rows, num_units, 4, lane_parts, 4, 4) for half in (self.hi, self.lo)]
        pairs = np.full((blocks * tokens, num_units, 2, 4, lane_parts, 4, 4), unused, np.uint8)
        pairs[:num_rows] = np.stack(lanes, axis=2)
        # [block, token, unit, half, t, part, piece, bytes] -> [block, unit, part, piece, token, half, t, bytes]
        laid = pairs.reshape(blocks, tokens, num_units, 2, 4, lane_parts, 4, 4).transpose(0, 2, 5, 6, 1, 3, 4, 7)
        parts = [laid.reshape(blocks, num_units, -1)]
        if has_unit_scale(self.layout):
            scales = np.full((blocks * tokens, num_units, 4), unused, np.uint8)
            scales[:num_rows] = self.inverses[..., None].view(np.uint8)
            parts.append(
                scales.reshape(blocks, tokens, num_units, 4).transpose(0, 2, 1, 3).reshape(blocks, num_units, -1)
            )
        return np.ascontiguousarray(np.concatenate(parts, axis=2)).reshape(-1)


def halves_of(layout: TileLayout, values: np.ndarray) -> Halves:
    """The pairs of rows, already times the norm's weights. Shapes: values float32 [num_rows, num_inputs]"""
    dtype: Any = np.float16 if layout.weight_type == "fp8" else DTYPES[layout.weight_type]
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % layout.span_inputs)))
    units = padded.reshape(len(values), layout.num_units, layout.unit_inputs)
    inverses = np.ones(units.shape[:2], np.float32)
    if has_unit_scale(layout):
        spans = np.abs(padded).reshape(len(values), layout.num_spans, layout.span_inputs).max(axis=2)
        exponents = spans.repeat(layout.num_units // layout.num_spans, axis=1).view(np.uint32) >> 23
        scale_exponents = np.minimum(254 + _TOP - exponents.astype(np.int64), 253)  # biased; both are normal numbers
        inverses = np.ldexp(np.float32(1), 127 - scale_exponents).astype(np.float32)
        units = units * np.ldexp(np.float32(1), scale_exponents - 127).astype(np.float32)[:, :, None]
    hi = to_storage(units, dtype)
    return Halves(layout, hi, to_storage(units - stored_values(hi).astype(np.float32), dtype), inverses)
