"""A quantized weight as files store it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.quantization.schemes import WeightScheme


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as stored: weight = (code - zero_point) * scale.

    Shapes: codes uint8 [output_size, input_size] for 8 bits; for 4 bits two codes a byte, the first in the low half;
            a row may be padded. scales [output_size, groups] in their stored type; zero_points uint8
            [output_size, groups], or None for a symmetric scheme
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.scheme.group_size or self.shape[1]

    def unpacked(self, rows: slice) -> Tensor:
        """Codes of some rows. Shapes: result uint8 [rows, input_size]."""
        codes = self.codes[rows]
        if self.scheme.num_bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        return codes[:, : self.shape[1]]

    def widened(self, rows: slice) -> Tensor:
        """Weights of some rows. Shapes: result float32 [rows, input_size]."""
        codes = self.unpacked(rows)
        zeros: Tensor | int = self.scheme.offset
        if self.zero_points is not None:
            zeros = self.zero_points[rows].float().unsqueeze(-1)  # [rows, groups, 1]
        grouped = codes.reshape(len(codes), -1, self.group_size).float()
        # In place: with a new block for each step a decoded token takes a sixth longer.
        return grouped.sub_(zeros).mul_(self.scales[rows].float().unsqueeze(-1)).flatten(1)
