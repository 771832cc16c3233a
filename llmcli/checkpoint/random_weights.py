"""Writes a model of a known shape with random weights, for measurements: through the exporter, or as it is.

Random numbers are made once and used again at other places, so that writing is as fast as the disk and the exporter.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from llmcli.checkpoint.export import Exporter, copy_tensor
from llmcli.checkpoint.export_plan import CONFIG_DTYPES, ExportPlan, plan_export
from llmcli.checkpoint.export_workspace import room_for_entries
from llmcli.checkpoint.folder import CONFIG_NAME, WEIGHTS_NAME, Checkpoint, quantization_of
from llmcli.checkpoint.formats import Awq, Fp8Layer, PackedLayer
from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_DTYPES, ExpectedTensor, expected_tensors
from llmcli.checkpoint.model import Model, match_tensors
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, OutputTensor, SafetensorsWriter, TensorInfo
from llmcli.config.llama import LlamaConfig
from llmcli.errors import OutputError, UsageError
from llmcli.quantization.config import AwqConfig, Fp8Config, Quantization
from llmcli.quantization.rounding import STORED_AS, Array, narrow
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.reading import CONFIG
from llmcli.resources import resource_folder

# Models known only by their shape, `configs/models/*.json`: every tensor has a name, a type and a size.
#
# Their exports are known as well, so memory can be planned without a file.

# Formats of a shape: a scheme, as `llmcli quantize` takes it without a --group-size, or the quantization_config with
# which others publish such a model; bf16 has none.
FORMATS: dict[str, WeightScheme | dict[str, Any]] = {
    "int8": WeightScheme(8, 128),
    "int4": WeightScheme(4, 128),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "bf16": {},
}


def shape_names() -> list[str]:
    """The names of all shapes."""
    return sorted(path.stem for path in _shapes_folder().glob("*.json"))


def shape_source(name: str, form: str) -> Model:
    """The model that a shape's format is made from: what would be quantized, or what is written as it is.

    Raises: UsageError for a name that is not a shape's; CheckpointError for a file that is not a config
    """
    path = _shapes_folder() / f"{name}.json"
    if name not in shape_names():
        raise UsageError(f"{name!r} is not a known shape; expected one of {', '.join(shape_names())}")
    config_json = CONFIG.read_json_object(path)
    if form == "bf16":
        config_json["dtype"] = "bfloat16"
    made_by_others = FORMATS[form]
    if isinstance(made_by_others, dict) and made_by_others:
        config_json["quantization_config"] = made_by_others
    config = LlamaConfig.from_dict(config_json, str(path))
    dtype = CONFIG_DTYPES[config_json["dtype"]]
    quantization = quantization_of(config_json, str(path))
    tensors: list[OutputTensor] = []
    for tensor in expected_tensors(config):
        tensors += _stored_as(tensor, quantization, dtype)
    if not config.tie_word_embeddings:
        tensors.append(OutputTensor(HEAD, dtype, (config.vocab_size, config.hidden_size)))
    return _model(path, Path(name), config_json, tensors)


def shape_model(name: str, form: str) -> Model:
    """The model that `llmcli quantize` would write of a shape, or what is written as it is.

    Raises: as `shape_source`
    """
    source = shape_source(name, form)
    scheme = FORMATS[form]
    return export_model(plan_export(source, ExportOptions(scheme))) if isinstance(scheme, WeightScheme) else source


def export_model(plan: ExportPlan) -> Model:
    """The model that a planned export is going to be."""
    tensors = (tensor for weight in plan.weights for tensor in weight.outputs)
    path = plan.weights[0].info.path
    return _model(path, plan.model.checkpoint.folder, dict(plan.config_json), tensors)


def _stored_as(weight: ExpectedTensor, quantization: Quantization | None, dtype: str) -> Iterator[OutputTensor]:
    """The tensors for a weight: itself, or a linear layer's in another program's format."""
    layer: Fp8Layer | PackedLayer
    if not weight.is_linear or quantization is None:
        yield OutputTensor(weight.name, dtype, weight.shape)
        return
    output_size, input_size = weight.shape
    if isinstance(quantization, Fp8Config):
        assert quantization.scheme is not None
        layer, scale_dtype = Fp8Layer(quantization.scheme, (output_size, input_size), "weight_scale_inv"), "F32"
    else:
        assert isinstance(quantization, AwqConfig)
        layer, scale_dtype = PackedLayer(quantization.scheme, (output_size, input_size), Awq()), "F16"
    for part in layer.tensors(weight):
        yield OutputTensor(part.name, scale_dtype if part.dtypes == WEIGHT_DTYPES else part.dtypes[0], part.shape)


def _model(path: Path, folder: Path, config_json: dict[str, Any], tensors: Iterable[OutputTensor]) -> Model:
    """A model whose tensors have no file; `path` is that of the shape, `folder` the model's name in messages."""
    infos: dict[str, TensorInfo] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: -ITEMSIZE_BYTES[tensor.dtype]):
        infos[tensor.name] = TensorInfo(tensor.name, tensor.dtype, tensor.shape, path, end, tensor.num_bytes)
        end += tensor.num_bytes
    config = LlamaConfig.from_dict(config_json, str(path))
    quantization = quantization_of(config_json, str(path))
    return Model(
        Checkpoint(folder, config_json, {}, infos),
        config,
        match_tensors(config, infos, str(path), quantization),
    )


def _shapes_folder() -> Path:
    return resource_folder("configs") / "models"


OnProgress = Callable[[int, int], None]  # bytes done, bytes in all

# A prime, so that rows of any length begin at other places of the pool.
POOL_SIZE = 8_388_593

_BIAS_SCALE = 0.1
# Codes of others: the bits that are random. 8-bit floats without the highest bit of their exponent are never NaN.
_CODE_MASKS = {"I32": np.uint8(0xFF), "F8_E4M3": np.uint8(0xBF)}
_SCALES = (".scales", ".weight_scale_inv")


class RandomReader(TensorReader):
    """Reads tensors that no file holds. Norms are ones; other weights are normal, scaled so that logits stay sane.

    Codes of others are random bits, of 8-bit floats those of numbers below 2; their scales are all alike.

    A tensor's bytes depend on its name, type and shape alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._normal = np.random.default_rng(0).standard_normal(POOL_SIZE, dtype=np.float32)
        self._codes = np.random.default_rng(1).integers(0, 256, POOL_SIZE, np.uint8)
        self._pools: dict[tuple[str, float], Array] = {}

    def _read_range(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        if info.dtype in _CODE_MASKS:
            codes = np.frombuffer(view, np.uint8)
            codes[:] = np.resize(np.roll(self._codes, -(zlib.crc32(info.name.encode()) + begin)), len(codes))
            codes &= _CODE_MASKS[info.dtype]
            return
        target = np.frombuffer(view, STORED_AS[info.dtype])
        if info.name.endswith(_SCALES):
            target[:] = _code_scale(info)
            return
        if info.name.endswith("norm.weight"):
            target[:] = narrow(np.ones(1, np.float32), info.dtype)
            return
        pool = self._pool(info.dtype, _scale(info))
        place = (zlib.crc32(info.name.encode()) + begin // target.itemsize) % POOL_SIZE
        done = 0
        while done < len(target):
            part = pool[place : place + len(target) - done]
            target[done : done + len(part)] = part
            done, place = done + len(part), 0

    def _pool(self, dtype: str, scale: float) -> Array:
        if (dtype, scale) not in self._pools:
            self._pools[dtype, scale] = narrow(self._normal * np.float32(scale), dtype)  # cut off
        return self._pools[dtype, scale]


def write_shape(name: str, form: str, destination: Path, on_progress: OnProgress) -> None:
    """Write the shape `name` in a format of `FORMATS` as a model folder, which must not exist.

    Nothing remains if it fails or is stopped.
    Raises: UsageError as `shape_source`; CheckpointError, OutputError for a disk that is full or cannot be written
    """
    scheme = FORMATS[form]
    source_folder = destination.with_name(f"{destination.name}.source")
    shutil.rmtree(source_folder, ignore_errors=True)
    try:
        source_folder.mkdir(parents=True)
        model = shape_source(name, form)
        source = replace(model, checkpoint=replace(model.checkpoint, folder=source_folder))
        if not isinstance(scheme, WeightScheme):
            _write_plain(source, source_folder, on_progress)
            source_folder.rename(destination)
        else:
            exporter = Exporter(plan_export(source, ExportOptions(scheme)), destination, name, open_reader=RandomReader)
            workspace = exporter.prepare()
            with exporter.lock:  # as long as something may be removed
                try:
                    exporter.run(workspace, on_progress, lambda module, quality: None)
                except BaseException:
                    workspace.discard()
                    raise
    except OSError as error:
        raise OutputError(
            f"{destination} cannot be written: {error.strerror or error}; give another folder with --scratch"
        ) from error
    finally:
        shutil.rmtree(source_folder, ignore_errors=True)


def _write_plain(model: Model, folder: Path, on_progress: OnProgress) -> None:
    """The weights as they are, in one file. Not made durable: they need not survive a power cut."""
    infos = model.checkpoint.tensors
    total = sum(info.num_bytes for info in infos.values())
    needed = total + room_for_entries(len(infos))
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OutputError(
            f"the disk of {folder.parent} has {decimal(free)} free; the model needs {decimal(needed)}; "
            "give another folder with --scratch"
        )
    (folder / CONFIG_NAME).write_text(json.dumps(model.checkpoint.config_json), encoding="utf-8")
    tensors = [OutputTensor(info.name, info.dtype, info.shape) for info in infos.values()]
    done = 0
    with SafetensorsWriter(folder / WEIGHTS_NAME, tensors) as writer, RandomReader() as reader:
        for info in infos.values():
            for num_bytes in copy_tensor(info, info.name, reader, writer):
                done += num_bytes
                on_progress(done, total)


def _scale(info: TensorInfo) -> float:
    """Products keep the size of their input; the head spreads logits by about 2, and an embedding alone is small."""
    if len(info.shape) == 1:
        return _BIAS_SCALE
    factor = 2.0 if info.name in (EMBEDDING, HEAD) else 1.0
    return float(factor * info.shape[-1] ** -0.5)


def _code_scale(info: TensorInfo) -> float:
    """The scale of codes or of 8-bit floats with which products keep the size of their input; groups are of 128."""
    is_fp8 = info.dtype == "F32"
    num_inputs = 128 * info.shape[1 if is_fp8 else 0]
    size = 0.6 if is_fp8 else 6.5  # of random 8-bit floats below 2; of differences of two codes of 4 bits
    return float(num_inputs**-0.5 / size)
