"""Quantized weights in another form than they are stored in: as `pack-quantized`, and as float32."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.formats import Array, PackedLayer, PackQuantized, StoredLayer, read_layer
from llmcli.checkpoint.layout import WEIGHT_DTYPES, WEIGHT_SUFFIX, ExpectedTensor
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import Floats, TensorReader, read_floats, read_rows
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, TensorInfo
from llmcli.quantization.rounding import pack_zero_points, unpack_rows, unpack_zero_points, widen
from llmcli.quantization.schemes import WeightScheme

# A model of another format as if its files were compressed-tensors `pack-quantized`, for reading tensors by ranges.
#
# Inputs that were ordered before they were grouped come group by group, by `Model.input_orders`. A layer is brought
# into our order when the first of its tensors is requested, and kept until others are.

# Layers kept: as many as readers that run ahead of one another touch at a time.
_MAX_LAYERS = 6

_OUR_FORMAT = PackQuantized()


class Translation:
    """`model` is the model in our form; its tensors are read by readers that `open_reader` opens, in any thread.

    `original` is the model as its files are.
    """

    def __init__(self, model: Model):
        self.original = model
        self._foreign = {module: layer for module, layer in model.tensors.packed.items() if layer.format != _OUR_FORMAT}
        self._of_tensor: dict[str, str] = {}  # the module of each tensor that no file holds
        self.model = self._translated() if self._foreign else model
        self._layers: OrderedDict[str, Future[dict[str, Array]]] = OrderedDict()
        self._lock = Lock()

    def open_reader(self) -> TensorReader:
        """A reader of the model's tensors."""
        return _TranslatingReader(self) if self._foreign else TensorReader()

    def bytes_of(self, info: TensorInfo, reader: TensorReader) -> Array | None:
        """The bytes of a tensor that no file holds; None for one that a file does. `reader` reads the files.

        Shapes: result uint8 [num_bytes]
        """
        module = self._of_tensor.get(info.name)
        if module is None:
            return None
        if info.name.endswith("_shape"):  # requested before any layer is read
            return np.array(self._foreign[module].shape, np.int64).view(np.uint8)
        with self._lock:
            is_first = module not in self._layers
            future = self._layers.setdefault(module, Future())
            while len(self._layers) > _MAX_LAYERS:
                self._layers.popitem(last=False)
        if is_first:
            try:
                future.set_result(self._read(module, reader))
            except BaseException as error:
                future.set_exception(error)
        return future.result()[info.name]

    def _read(self, module: str, reader: TensorReader) -> dict[str, Array]:
        layer, weight = self._foreign[module], module + WEIGHT_SUFFIX
        stored = read_layer(module, layer, self.original.tensors.tensors, reader)
        arrays = {f"{weight}_packed": stored.packed, f"{weight}_scale": stored.scales}
        if stored.zero_points is not None:
            arrays[f"{weight}_zero_point"] = pack_zero_points(stored.zero_points, layer.scheme.num_bits)
        return {name: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}

    def _translated(self) -> Model:
        tensors = self.original.tensors
        infos: dict[str, TensorInfo] = {}
        for source, parts in tensors.sources.items():
            if source in self._foreign:
                for info in _our_tensors(source, self._foreign[source], parts):
                    infos[info.name] = info
                    self._of_tensor[info.name] = source
            else:
                infos |= {info.name: info for info in parts}
        packed = {module: replace(layer, format=_OUR_FORMAT) for module, layer in tensors.packed.items()}
        return replace(self.original, tensors=replace(tensors, tensors=infos, packed=packed))


class _TranslatingReader(TensorReader):
    def __init__(self, translation: Translation):
        super().__init__()
        self._translation = translation

    def _read_range(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        # The layer itself is read from the files as they are, some of whose tensors have the names of ours.
        with TensorReader() as files:
            values = self._translation.bytes_of(info, files)
        if values is None:
            super()._read_range(info, begin, view)
        else:
            view[:] = values[begin : begin + len(view)].data


def _our_tensors(module: str, layer: PackedLayer, parts: tuple[TensorInfo, ...]) -> Iterator[TensorInfo]:
    """The tensors of a layer in our form, at the place of its first one."""
    scale_dtype = next(info.dtype for info in parts if info.dtype in WEIGHT_DTYPES)
    weight = ExpectedTensor(module + WEIGHT_SUFFIX, layer.shape, "", is_linear=True)
    for tensor in _OUR_FORMAT.tensors(weight, layer.scheme):
        dtype = scale_dtype if tensor.dtypes == WEIGHT_DTYPES else tensor.dtypes[0]
        num_bytes = int(np.prod(tensor.shape)) * ITEMSIZE_BYTES[dtype]
        yield TensorInfo(tensor.name, dtype, tensor.shape, parts[0].path, parts[0].offset, num_bytes)


# Quantized weights as float32, from their codes, scales and zero points.

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
