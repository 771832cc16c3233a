"""A model of another format as if its files were compressed-tensors `pack-quantized`, for who reads tensors by ranges.

Inputs that were ordered before they were grouped come group by group, by `Model.input_orders`. A layer is brought into
our order when the first of its tensors is asked for, and kept until others have been.
"""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock

import numpy as np

from llmcli.checkpoint.formats import Array, PackedLayer, PackQuantized, read_layer
from llmcli.checkpoint.layout import WEIGHT_DTYPES, WEIGHT_SUFFIX, ExpectedTensor
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, TensorInfo
from llmcli.quantization.packing import pack_zero_points

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
        if info.name.endswith("_shape"):  # asked for before any layer is read
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
