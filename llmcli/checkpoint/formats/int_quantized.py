"""compressed-tensors `int-quantized`: weights of 8 bits, a byte each, with their sign; usually of w8a8 models."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.formats.base import Array, LayerSource, StoredLayer
from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.quantization.packing import pack_rows
from llmcli.quantization.schemes import WeightScheme

_SIGN_BIT = np.uint8(0x80)


@dataclass(frozen=True)
class IntQuantized:
    """A layer has weight, weight_scale and, asymmetric, weight_zero_point."""

    name: str = "compressed-tensors int-quantized"

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight."""
        output_size, input_size = weight.shape
        shape = (output_size, input_size)
        reason = f"{weight.name} {list(shape)} as {scheme}"
        yield ExpectedTensor(weight.name, shape, reason, dtypes=("I8",))
        yield ExpectedTensor(f"{weight.name}_scale", scheme.scale_shape(shape), reason)
        if not scheme.is_symmetric:
            yield ExpectedTensor(f"{weight.name}_zero_point", scheme.scale_shape(shape), reason, dtypes=("I8",))

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer; q becomes the code q + 128."""
        scales, scale_dtype = source.read_scales("weight_scale")
        zero_points = None
        if not source.layer.scheme.is_symmetric:
            zero_points = _codes(source.read("weight_zero_point"))
        return StoredLayer(pack_rows(_codes(source.read("weight")), 8), scales, scale_dtype, zero_points)

    def read_order(self, source: LayerSource) -> None:
        """Inputs have their own order."""


def _codes(values: Array) -> Array:
    """q + 128 in one byte, which flips the highest bit. Shapes: values int8; the result uint8 of that shape"""
    codes: Array = values.view(np.uint8) ^ _SIGN_BIT
    return codes
