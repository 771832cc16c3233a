"""Layers with the same input: if all have packed weights of one form, they are one matrix, multiplied at once."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmcli.runners.torch.codes_product import CodesProduct
from llmcli.runners.torch.packed_linear import PackedLinear
from llmcli.runners.torch.packed_weight import PackedWeight


class Layer(Protocol):
    """A linear layer."""

    def each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply to each part by itself."""


class JoinedLinear:
    """Rows of one matrix that belong to several layers. A row has the same bits as in its own matrix."""

    def __init__(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]):
        self._sizes = [weight.shape[0] for weight in weights]
        self._linear = PackedLinear(_joined(weights), None, torch.bfloat16)
        self._biases = [None if bias is None else bias.float() for bias in biases]

    def each(self, xs: Sequence[Tensor]) -> list[list[Tensor]]:
        """The result of each layer for each part."""
        of_parts = [torch.split(y, self._sizes, dim=1) for y in self._linear.each(xs)]
        return [
            [y if bias is None else y + bias for y in of_layer]
            for of_layer, bias in zip(zip(*of_parts, strict=True), self._biases, strict=True)
        ]

    @staticmethod
    def takes(weights: Sequence[PackedWeight], dtype: torch.dtype) -> bool:
        """Whether the weights have one form and our own product, which sums each row by itself."""
        first = weights[0]
        are_alike = all(
            (weight.scheme, weight.shape[1], weight.scales.dtype, weight.zero_points is None)
            == (first.scheme, first.shape[1], first.scales.dtype, first.zero_points is None)
            for weight in weights
        )
        return are_alike and dtype == torch.bfloat16 and CodesProduct.takes(first)


class SeparateLinears:
    """Layers that are multiplied one after the other."""

    def __init__(self, layers: Sequence[Layer]):
        self._layers = layers

    def each(self, xs: Sequence[Tensor]) -> list[list[Tensor]]:
        """The result of each layer for each part."""
        return [layer.each(xs) for layer in self._layers]


def _joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Their rows, one after the other."""
    first = weights[0]
    zero_points = [weight.zero_points for weight in weights if weight.zero_points is not None]
    return PackedWeight(
        first.scheme,
        (sum(weight.shape[0] for weight in weights), first.shape[1]),
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(zero_points) if zero_points else None,
    )
