"""Quantized weights as float32, from their codes, scales and zero points."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import StoredLayer
from llmcli.checkpoint.layout import WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import Floats, TensorReader, read_floats, read_rows, read_whole
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.quantization.floats import widen
from llmcli.quantization.packing import unpack_rows, unpack_zero_points
from llmcli.quantization.schemes import WeightScheme

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of one `pack-quantized` layer; `zero_points` is None if the scheme is symmetric."""

    scheme: WeightScheme
    codes: TensorInfo
    scales: TensorInfo
    zero_points: TensorInfo | None


def widened(model: Model) -> Model:
    """The model as it lies in memory when all its weights are float32, to plan with; its tensors are in no file."""
    layers = model.tensors.quantized
    plain: dict[str, TensorInfo] = {}
    for name, info in model.tensors.tensors.items():
        module = name.rpartition(".")[0]
        is_part = module in layers and not name.endswith(".bias")
        name, shape = (module + WEIGHT_SUFFIX, layers[module].shape) if is_part else (name, info.shape)
        num_bytes = _FLOAT_BYTES * math.prod(shape)
        plain[name] = replace(info, name=name, dtype="F32", shape=shape, num_bytes=num_bytes)
    return replace(model, tensors=replace(model.tensors, tensors=plain, packed={}, scaled={}))


def widen_layer(layer: StoredLayer, scheme: WeightScheme, weights: Floats) -> None:
    """Fill `weights` with those of a layer, inputs in the model's order. Shapes: weights [output_size, input_size]"""
    codes = unpack_rows(layer.packed, scheme.num_bits, weights.shape[1])
    zeros = scheme.offset if layer.zero_points is None else layer.zero_points
    widened = weights if layer.input_order is None else np.empty_like(weights)
    _widen(codes, widen(layer.scales, layer.scale_dtype), zeros, widened)
    if layer.input_order is not None:
        weights[:, layer.input_order] = widened


def read_widened(layer: PackedTensors, begin: int, end: int, reader: TensorReader, weights: Floats) -> None:
    """Rows begin ... end - 1 of a quantized weight; zero points are packed by the 8 rows, where `begin` must lie.

    Shapes: weights [end - begin, input_size], contiguous, which is filled
    Raises: CheckpointError for read errors, NaN and infinity
    """
    num_rows, num_bits = end - begin, layer.scheme.num_bits
    zeros: npt.NDArray[Any] | int = layer.scheme.offset
    if layer.zero_points is not None:
        rows_per_word = 32 // num_bits
        words = read_rows(layer.zero_points, begin // rows_per_word, -(-end // rows_per_word), reader)
        zeros = unpack_zero_points(words, num_bits, num_rows)
    codes = unpack_rows(read_rows(layer.codes, begin, end, reader), num_bits, weights.shape[1])
    _widen(codes, read_floats(layer.scales, begin, end, reader), zeros, weights)


def _widen(codes: npt.NDArray[Any], scales: Floats, zeros: npt.NDArray[Any] | int, weights: Floats) -> None:
    """(code - zero point) * scale.

    Shapes: codes uint8 [rows, input_size]; scales and zeros [rows, groups], or one zero point for all; weights float32
            [rows, input_size], contiguous, which is filled
    """
    grouped = weights.reshape(*scales.shape, -1)  # the same memory
    if not isinstance(zeros, int):
        zeros = zeros.astype(np.float32)[:, :, None]
    np.subtract(codes.reshape(grouped.shape), zeros, out=grouped, dtype=np.float32)
    grouped *= scales[:, :, None]


def check_shape(info: TensorInfo, shape: tuple[int, int], reader: TensorReader) -> None:
    """Refuse a stored weight_shape unlike the layer's. Raises: CheckpointError, also for read errors."""
    stored = read_whole(info, reader)
    if tuple(stored.tolist()) != shape:
        raise CheckpointError(f"{info.name} is {stored.tolist()}, expected {list(shape)}; damaged export?")
