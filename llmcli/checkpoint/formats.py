"""How quantized layers are stored: the interface of a format, and each format, which names and reads its tensors.

Our order is that of compressed-tensors `pack-quantized`: a row of codes for each output, the first in the lowest bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.checkpoint.reader import Floats, TensorReader, not_finite, read_rows, read_whole
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization import rounding
from llmcli.quantization.schemes import Fp8Scheme, WeightScheme, packed_size

# The interface of a format: the tensors that it expects of a layer, and the layer in our order.

Array = npt.NDArray[Any]


class Format(Protocol):
    """How the tensors of a quantized linear layer are named and laid out. A value: equal formats read alike."""

    @property
    def name(self) -> str:
        """The name that users see."""

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight [output_size, input_size]."""

    def read(self, source: "LayerSource") -> "StoredLayer":
        """Read a layer and bring it into our layout; codes stay in the order of the inputs, for any `input_order`.

        Raises: CheckpointError for read errors, and for values that contradict one another
        """

    def read_order(self, source: "LayerSource") -> Array | None:
        """Read the `input_order` of the layer alone. Raises: as `read`"""


@dataclass(frozen=True)
class PackedLayer:
    """A quantized linear layer: scheme, the shape [output_size, input_size] of the weight it encodes, and format."""

    scheme: WeightScheme
    shape: tuple[int, int]
    format: Format

    def tensors(self, weight: ExpectedTensor) -> Iterator[ExpectedTensor]:
        """The tensors that replace its weight."""
        return self.format.tensors(weight, self.scheme)


@dataclass(frozen=True)
class StoredLayer:
    """A layer in our order; weight = (code - zero_point) * scale.

    Shapes: packed int32 [output_size, words]; scales [output_size, groups], held as STORED_AS[scale_dtype];
            zero_points uint8 [output_size, groups], None for a symmetric scheme; input_order int64 [input_size]: the
            input that code i of every row belongs to once the codes are sorted, None if it is input i
    """

    packed: Array
    scales: Array
    scale_dtype: str
    zero_points: Array | None
    input_order: Array | None = None

    def group_index(self, layer: PackedLayer) -> Array:
        """The group of each input. Shapes: result int32 [input_size]"""
        num_inputs = layer.shape[1]
        groups = (np.arange(num_inputs) // (layer.scheme.group_size or num_inputs)).astype(np.int32)
        index = np.empty_like(groups)
        index[slice(None) if self.input_order is None else self.input_order] = groups
        return index


@dataclass(frozen=True)
class LayerSource:
    """Where a layer's tensors are read from: those of the model by name."""

    module: str
    layer: PackedLayer
    infos: Mapping[str, TensorInfo]
    reader: TensorReader

    def info(self, part: str) -> TensorInfo:
        """The tensor of that name in the module."""
        return self.infos[f"{self.module}.{part}"]

    def read(self, part: str) -> Array:
        """The tensor of that name in the module, as it is stored."""
        return read_whole(self.info(part), self.reader)

    def read_scales(self, part: str) -> tuple[Array, str]:
        """Scales as they are stored, and their type. Raises: CheckpointError for NaN and infinity, too"""
        info, scales = self.info(part), self.read(part)
        if not np.isfinite(rounding.widen(scales, info.dtype)).all():
            raise not_finite(info)
        return scales, info.dtype


def read_layer(module: str, layer: PackedLayer, infos: Mapping[str, TensorInfo], reader: TensorReader) -> StoredLayer:
    """A layer of a model in our order, codes sorted by `input_order`; `infos` are the model's tensors.

    Raises: as `read_stored`
    """
    stored = read_stored(module, layer, infos, reader)
    if stored.input_order is None:
        return stored
    return replace(stored, packed=rounding.reorder_rows(stored.packed, layer.scheme.num_bits, stored.input_order))


def read_stored(module: str, layer: PackedLayer, infos: Mapping[str, TensorInfo], reader: TensorReader) -> StoredLayer:
    """As `read_layer`, with the codes in the order of the inputs.

    Raises: CheckpointError for read errors, NaN and infinity, and for values that contradict one another
    """
    return layer.format.read(LayerSource(module, layer, infos, reader))


def read_orders(
    layers: Mapping[str, PackedLayer], infos: Mapping[str, TensorInfo], reader: TensorReader
) -> dict[str, Array]:
    """The `input_order` of each layer that has one, by module name; `infos` are the model's tensors.

    Raises: as `read_layer`
    """
    orders = {
        module: layer.format.read_order(LayerSource(module, layer, infos, reader)) for module, layer in layers.items()
    }
    return {module: order for module, order in orders.items() if order is not None}


def input_order(
    source: LayerSource, part: str, is_declared: bool | None, *, may_be_unset: bool = False
) -> Array | None:
    """The order in which the inputs of a layer fall into groups of neighbours, from the group that each belongs to.

    `is_declared` is what the config says: that inputs were ordered, that they were not, or nothing. With `may_be_unset`
    an index of -1 throughout means that they were not.
    Raises: CheckpointError where the groups contradict it, or are not of equal size
    """
    groups, (_, num_inputs), scheme = source.read(part), source.layer.shape, source.layer.scheme
    size = scheme.group_size or num_inputs
    if np.array_equal(groups, np.arange(num_inputs) // size) or (may_be_unset and (groups == -1).all()):
        return None
    where = f"{source.info(part).name} in {source.info(part).path.name}"
    num_groups = scheme.num_groups(num_inputs)
    if groups.min() < 0 or groups.max() >= num_groups:
        wrong = groups[(groups < 0) | (groups >= num_groups)][0]
        raise CheckpointError(
            f"{where} names group {wrong}, expected 0 to {num_groups - 1}: the order of the inputs is not known; "
            "download the model again"
        )
    if is_declared is False:
        raise CheckpointError(
            f"{where} orders the inputs, and config.json says that they are not ordered (desc_act, actorder); "
            "one of them is wrong: download the model again"
        )
    if (np.bincount(groups, minlength=num_groups) != size).any():
        raise CheckpointError(
            f"{where} has groups of other sizes, expected {num_groups} of {size} inputs; download the model again"
        )
    order: Array = np.argsort(groups, kind="stable")
    return order


# AWQ's `gemm` layout: codes of 4 bits in int32 along the outputs, eight of them in an order of their own.

AWQ_WORD_COLUMNS = 8  # outputs in an int32


@dataclass(frozen=True)
class Awq:
    """A layer has qweight, qzeros and scales, all of them with a row for each input or group."""

    name: str = "AWQ gemm"

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight, whose outputs are a multiple of 8."""
        module, (output_size, input_size) = weight.layer, weight.shape
        num_groups, words = scheme.num_groups(input_size), output_size // AWQ_WORD_COLUMNS
        reason = f"{weight.name} {list(weight.shape)} as AWQ, {scheme}"
        yield ExpectedTensor(f"{module}.qweight", (input_size, words), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.qzeros", (num_groups, words), reason, dtypes=("I32",))
        yield ExpectedTensor(f"{module}.scales", (num_groups, output_size), reason)

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer and transpose it, code for code."""
        scales, scale_dtype = source.read_scales("scales")
        return StoredLayer(
            packed=rounding.rows_of_awq(source.read("qweight")),
            scales=np.ascontiguousarray(scales.T),
            scale_dtype=scale_dtype,
            zero_points=rounding.unpack_awq_columns(source.read("qzeros")),
        )

    def read_order(self, source: LayerSource) -> None:
        """None: inputs keep their order."""


# GPTQ, versions 1 and 2: codes of 4 or 8 bits in int32 along the inputs, a column for each output.


@dataclass(frozen=True)
class Gptq:
    """A layer has qweight, qzeros, scales and, with `stores_order`, g_idx: the group of each input.

    `zero_offset` is what was subtracted from the zero points; `orders_inputs` what the config says of g_idx, or None.
    """

    zero_offset: int
    stores_order: bool
    orders_inputs: bool | None

    @property
    def name(self) -> str:
        """The name with its version, and whether inputs were ordered."""
        version = "GPTQ" if self.zero_offset else "GPTQ v2"
        return f"{version} with desc_act" if self.orders_inputs else version

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight."""
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
        """Read a layer and transpose it, code for code."""
        scales, scale_dtype = source.read_scales("scales")
        return StoredLayer(
            packed=rounding.rows_of_columns(source.read("qweight")),
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
            stored = rounding.unpack_rows(words.view(np.int32), scheme.num_bits, source.layer.shape[0])
            # Not every program that writes version 1 subtracts the 1. The values show which it is.
            expected = [scheme.offset - offset for offset in range(self.zero_offset, -1, -1)]
            if not any((stored == value).all() for value in expected):
                raise CheckpointError(
                    f"{info.name} in {info.path.name} holds zero points other than {' or '.join(map(str, expected))} "
                    "throughout, and config.json says sym true; one of them is wrong"
                )
            return None
        # The 1 came off whole words, where a zero point of 0 borrows from its neighbour; it is added likewise.
        ones = sum(1 << shift for shift in range(0, 32, scheme.num_bits)) * self.zero_offset
        words = words + np.uint32(ones)
        zero_points = rounding.unpack_rows(words.view(np.int32), scheme.num_bits, source.layer.shape[0])
        if self.zero_offset and (zero_points == scheme.offset + 1).all():  # the middle throughout, with the 1 added
            raise CheckpointError(
                f"{info.name} in {info.path.name} holds {scheme.offset} throughout, as symmetric weights have it, "
                f"which version 1 of GPTQ reads as {scheme.offset + 1}; set sym to true in config.json if the model is "
                'symmetric, or checkpoint_format to "gptq_v2"'
            )
        return np.ascontiguousarray(zero_points.T)


# compressed-tensors `int-quantized`: weights of 8 bits, a byte each, with their sign; usually of w8a8 models.

_SIGN_BIT = np.uint8(0x80)


@dataclass(frozen=True)
class IntQuantized:
    """A layer has weight, weight_scale and, asymmetric, weight_zero_point."""

    name: str = "compressed-tensors int-quantized"

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight."""
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
        return StoredLayer(rounding.pack_rows(_codes(source.read("weight")), 8), scales, scale_dtype, zero_points)

    def read_order(self, source: LayerSource) -> None:
        """None: inputs keep their order."""


def _codes(values: Array) -> Array:
    """q + 128 in one byte, which flips the highest bit. Shapes: values int8; the result uint8 of that shape"""
    codes: Array = values.view(np.uint8) ^ _SIGN_BIT
    return codes


# compressed-tensors `pack-quantized`: codes of 4 or 8 bits in int32, along the inputs of each output.


def check_shape(info: TensorInfo, shape: tuple[int, int], reader: TensorReader) -> None:
    """Refuse a stored weight_shape unlike the layer's. Raises: CheckpointError, also for read errors."""
    stored = read_whole(info, reader)
    if tuple(stored.tolist()) != shape:
        raise CheckpointError(f"{info.name} is {stored.tolist()}, expected {list(shape)}; damaged export?")


@dataclass(frozen=True)
class PackQuantized:
    """With `stores_order` a layer has the group of each input; `orders_inputs` is what the config says of it."""

    stores_order: bool = False
    orders_inputs: bool = False

    @property
    def name(self) -> str:
        """The name, with whether inputs were ordered."""
        return "compressed-tensors pack-quantized" + (" with g_idx" if self.orders_inputs else "")

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight; weight_shape holds its own shape. Shapes: see `WeightScheme`."""
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
        check_shape(source.info("weight_shape"), shape, source.reader)
        packed, (scales, scale_dtype) = source.read("weight_packed"), source.read_scales("weight_scale")
        zero_points = None
        if not scheme.is_symmetric:
            zero_points = rounding.unpack_zero_points(source.read("weight_zero_point"), scheme.num_bits, shape[0])
            zero_points = np.ascontiguousarray(zero_points)
        return StoredLayer(packed, scales, scale_dtype, zero_points, self.read_order(source))

    def read_order(self, source: LayerSource) -> Array | None:
        """Read the order of the inputs."""
        if not self.stores_order:
            return None
        # compressed-tensors fills the index with -1 before it is known.
        return input_order(source, "weight_g_idx", self.orders_inputs, may_be_unset=True)


# Weights of 8-bit floats (e4m3) with scales: one for a tensor, one for each row, or one for each block.
#
# compressed-tensors calls the form `float-quantized`; DeepSeek's and Qwen's fp8 models have blocks of 128 x 128.

FP8_DTYPE = "F8_E4M3"
# Both mean weight = stored * scale; the inverse is that of the scale with which the weight was divided.
SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv")

# Weights widened at a time: long compared with a call of numpy, short enough for the cache.
_BLOCK_ELEMENTS = 2**20


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer of 8-bit floats: the shape [output_size, input_size] of its weight, and its scales' name."""

    scheme: Fp8Scheme
    shape: tuple[int, int]
    scale: str

    def tensors(self, weight: ExpectedTensor) -> Iterator[ExpectedTensor]:
        """The tensors that replace a linear weight."""
        reason = f"{weight.name} {list(weight.shape)} as {self.scheme}"
        scale_shape = self.scheme.scale_shape(self.shape)
        # Scales of a whole tensor or of a row are stored with more or fewer dimensions of size 1.
        alike = ((), (1,), (1, 1)) if scale_shape == (1, 1) else ((scale_shape[0],),) if scale_shape[1] == 1 else ()
        yield ExpectedTensor(weight.name, weight.shape, reason, dtypes=(FP8_DTYPE,))
        yield ExpectedTensor(f"{weight.layer}.{self.scale}", scale_shape, reason, other_shapes=alike)

    def read(self, module: str, infos: Mapping[str, TensorInfo], reader: TensorReader) -> Iterator[tuple[int, Floats]]:
        """The weight in blocks of rows, each with the number of its first row.

        Shapes: blocks float32 [rows, input_size]
        Raises: CheckpointError for read errors, NaN and infinity
        """
        num_rows, input_size = self.shape
        step = max(1, _BLOCK_ELEMENTS // input_size)
        for begin in range(0, num_rows, step):
            yield begin, self.read_rows(module, infos, begin, min(begin + step, num_rows), reader)

    def read_rows(
        self, module: str, infos: Mapping[str, TensorInfo], begin: int, end: int, reader: TensorReader
    ) -> Floats:
        """Rows begin ... end - 1 of the weight. Shapes, Raises: as `read`."""
        info, scale_info, input_size = infos[f"{module}.weight"], infos[f"{module}.{self.scale}"], self.shape[1]
        scales = rounding.widen(self.read_scales(module, infos, begin, end, reader), scale_info.dtype)
        if not np.isfinite(scales).all():
            raise not_finite(scale_info)
        if self.scheme.block_inputs is not None:
            scales = scales.repeat(min(self.scheme.block_inputs, input_size), axis=1)[:, :input_size]
        weights: Floats = rounding.E4M3_VALUES[read_rows(info, begin, end, reader)]
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is checked below
            weights *= scales
        if not np.isfinite(weights).all():
            raise not_finite(info)
        return weights

    def read_scales(
        self, module: str, infos: Mapping[str, TensorInfo], begin: int, end: int, reader: TensorReader
    ) -> Array:
        """The scales of rows begin ... end - 1, as they are stored. Shapes: result [end - begin, input blocks]"""
        info, num_rows = infos[f"{module}.{self.scale}"], self.shape[0]
        scales = read_whole(info, reader).reshape(self.scheme.scale_shape(self.shape))
        # A block may be larger than the weight, by any number that a config.json holds.
        rows_of_block = min(self.scheme.block_rows or num_rows, num_rows)
        result: Array = scales[np.arange(begin, end) // rows_of_block]
        return result
