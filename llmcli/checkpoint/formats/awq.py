"""AWQ's `gemm` layout: codes of 4 bits in int32 along the outputs, eight of them in an order of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.formats.base import LayerSource, StoredLayer
from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.quantization.packing import rows_of_awq, unpack_awq_columns
from llmcli.quantization.schemes import WeightScheme

# Outputs in an int32.
AWQ_WORD_COLUMNS = 8


@dataclass(frozen=True)
class Awq:
    """A layer has qweight, qzeros and scales, all of them with a row for each input or group."""

    name: str = "AWQ gemm"

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight, whose outputs are a multiple of 8."""
        module, (output_size, input_size) = weight.layer, weight.shape
        num_groups, words = scheme.num_groups(input_size), output_size // AWQ_WORD_COLUMNS
        reason = f"{weight.name} {list(weight.shape)} as AWQ, {scheme}"
        yield ExpectedTensor(f"{module}.qweight", (input_size, words), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.qzeros", (num_groups, words), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.scales", (num_groups, output_size), reason)

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer and turn it, code for code."""
        scales, scale_dtype = source.read_scales("scales")
        return StoredLayer(
            packed=rows_of_awq(source.read("qweight")),
            scales=np.ascontiguousarray(scales.T),
            scale_dtype=scale_dtype,
            zero_points=unpack_awq_columns(source.read("qzeros")),
        )

    def read_order(self, source: LayerSource) -> None:
        """Inputs have their own order."""
