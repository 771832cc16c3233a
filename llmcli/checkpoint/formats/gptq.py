"""GPTQ, versions 1 and 2: codes of 4 or 8 bits in int32 along the inputs, a column for each output."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.formats.base import Array, LayerSource, StoredLayer, input_order
from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.errors import CheckpointError
from llmcli.quantization.packing import rows_of_columns, unpack_rows
from llmcli.quantization.schemes import WeightScheme, packed_size


@dataclass(frozen=True)
class Gptq:
    """A layer has qweight, qzeros, scales and, with `stores_order`, g_idx: the group of each input.

    `zero_offset` is what was taken off the zero points; `orders_inputs` is what the config says of g_idx, or None.
    """

    zero_offset: int
    stores_order: bool
    orders_inputs: bool | None

    @property
    def name(self) -> str:
        """With its version, and whether inputs were ordered."""
        version = "GPTQ" if self.zero_offset else "GPTQ v2"
        return f"{version} with desc_act" if self.orders_inputs else version

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight."""
        module, (output_size, input_size), bits = weight.layer, weight.shape, scheme.num_bits
        num_groups = scheme.num_groups(input_size)
        reason = f"{weight.name} {list(weight.shape)} as GPTQ, {scheme}"
        words, zero_words = packed_size(input_size, bits), packed_size(output_size, bits)
        yield ExpectedTensor(f"{module}.qweight", (words, output_size), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.qzeros", (num_groups, zero_words), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.scales", (num_groups, output_size), reason)
        if self.stores_order:
            yield ExpectedTensor(f"{module}.g_idx", (input_size,), reason, dtypes=("I32",))

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer and turn it, code for code."""
        scales, scale_dtype = source.read_scales("scales")
        return StoredLayer(
            packed=rows_of_columns(source.read("qweight")),
            scales=np.ascontiguousarray(scales.T),
            scale_dtype=scale_dtype,
            zero_points=self._zero_points(source),
            input_order=self.read_order(source),
        )

    def read_order(self, source: LayerSource) -> Array | None:
        """Read the order of the inputs."""
        return input_order(source, "g_idx", self.orders_inputs) if self.stores_order else None

    def _zero_points(self, source: LayerSource) -> Array | None:
        """None for a symmetric scheme, whose own must say the same. Shapes: result uint8 [output_size, groups]"""
        scheme, info = source.layer.scheme, source.info("qzeros")
        words = source.read("qzeros").view(np.uint32)
        if scheme.is_symmetric:
            stored = unpack_rows(words.view(np.int32), scheme.num_bits, source.layer.shape[0])
            # Not every program that writes version 1 takes the 1 off. Either way the values say which it is.
            expected = [scheme.offset - offset for offset in range(self.zero_offset, -1, -1)]
            if not any((stored == value).all() for value in expected):
                raise CheckpointError(
                    f"{info.name} in {info.path.name} holds zero points other than {' or '.join(map(str, expected))} "
                    "throughout, and config.json says sym true; one of them is wrong"
                )
            return None
        # The 1 was taken off whole words, where a zero point of 0 borrows from its neighbour; so it is added likewise.
        ones = sum(1 << shift for shift in range(0, 32, scheme.num_bits)) * self.zero_offset
        words = words + np.uint32(ones)
        zero_points = unpack_rows(words.view(np.int32), scheme.num_bits, source.layer.shape[0])
        if self.zero_offset and (zero_points == scheme.offset + 1).all():  # the middle throughout, with the 1 added
            raise CheckpointError(
                f"{info.name} in {info.path.name} holds {scheme.offset} throughout, as symmetric weights have it, "
                f"which version 1 of GPTQ reads as {scheme.offset + 1}; set sym to true in config.json if the model is "
                'symmetric, or checkpoint_format to "gptq_v2"'
            )
        return np.ascontiguousarray(zero_points.T)
