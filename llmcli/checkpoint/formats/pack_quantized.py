"""compressed-tensors `pack-quantized`: codes of 4 or 8 bits in int32, along the inputs of each output."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.formats.base import Array, LayerSource, StoredLayer, input_order
from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.errors import CheckpointError
from llmcli.quantization.packing import unpack_zero_points
from llmcli.quantization.schemes import WeightScheme


@dataclass(frozen=True)
class PackQuantized:
    """With `stores_order` a layer has the group of each input; `orders_inputs` is what the config says of it."""

    stores_order: bool = False
    orders_inputs: bool = False

    @property
    def name(self) -> str:
        """With whether inputs were ordered."""
        return "compressed-tensors pack-quantized" + (" with g_idx" if self.orders_inputs else "")

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight; weight_shape holds its own shape. Shapes: see `WeightScheme`."""
        output_size, input_size = weight.shape
        shape = (output_size, input_size)
        reason = f"{weight.name} {list(shape)} as {scheme}"
        yield ExpectedTensor(f"{weight.name}_packed", scheme.packed_shape(shape), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{weight.name}_scale", scheme.scale_shape(shape), reason)
        yield ExpectedTensor(f"{weight.name}_shape", (2,), reason, dtypes=("I64", "I32"))
        if not scheme.is_symmetric:
            yield ExpectedTensor(f"{weight.name}_zero_point", scheme.zero_point_shape(shape), reason, dtypes=("I32",))
        if self.stores_order:
            yield ExpectedTensor(f"{weight.name}_g_idx", (input_size,), reason, dtypes=("I32",))

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer; it is in our layout."""
        scheme, shape = source.layer.scheme, source.layer.shape
        stored_shape = source.read("weight_shape").tolist()
        if tuple(stored_shape) != shape:
            name = source.info("weight_shape").name
            raise CheckpointError(f"{name} is {stored_shape}, expected {list(shape)}; damaged export?")
        packed, (scales, scale_dtype) = source.read("weight_packed"), source.read_scales("weight_scale")
        zero_points = None
        if not scheme.is_symmetric:
            zero_points = unpack_zero_points(source.read("weight_zero_point"), scheme.num_bits, shape[0])
            zero_points = np.ascontiguousarray(zero_points)
        return StoredLayer(packed, scales, scale_dtype, zero_points, self.read_order(source))

    def read_order(self, source: LayerSource) -> Array | None:
        """Read the order of the inputs."""
        if not self.stores_order:
            return None
        # compressed-tensors fills the index with -1 before it is known.
        return input_order(source, "weight_g_idx", self.orders_inputs, may_be_unset=True)
