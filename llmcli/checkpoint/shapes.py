"""Models of which only the shape is there, `configs/models/*.json`: every tensor has a name, a type and a size.

What such a model would be as an export is known as well, so its memory can be planned without a file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.export_plan import CONFIG_DTYPES, ExportPlan, plan_export
from llmcli.checkpoint.folder import Checkpoint, quantization_of
from llmcli.checkpoint.layout import HEAD, expected_tensors
from llmcli.checkpoint.matching import match_tensors
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.safetensors_header import ITEMSIZE_BYTES
from llmcli.checkpoint.writer import OutputTensor
from llmcli.config.llama import LlamaConfig
from llmcli.errors import UsageError
from llmcli.quantization.schemes import WeightScheme
from llmcli.reading import CONFIG
from llmcli.resources import resource_folder

# What a shape can be measured as. The schemes are what `llmcli quantize` takes without a --group-size.
FORMATS: dict[str, WeightScheme | None] = {"int8": WeightScheme(8, 128), "int4": WeightScheme(4, 128), "bf16": None}


def shape_names() -> list[str]:
    """The names of all shapes."""
    return sorted(path.stem for path in _shapes_folder().glob("*.json"))


def shape_source(name: str, form: str) -> Model:
    """The float model that a shape's format is made from: bf16 itself, or what would be quantized.

    Raises: UsageError for a name that is no shape's; CheckpointError for a file that is no config
    """
    path = _shapes_folder() / f"{name}.json"
    if name not in shape_names():
        raise UsageError(f"{name!r} is not a known shape; expected one of {', '.join(shape_names())}")
    config_json = CONFIG.read_json_object(path)
    if form == "bf16":
        config_json["dtype"] = "bfloat16"
    config = LlamaConfig.from_dict(config_json, str(path))
    dtype = CONFIG_DTYPES[config_json["dtype"]]
    tensors = [OutputTensor(tensor.name, dtype, tensor.shape) for tensor in expected_tensors(config)]
    if not config.tie_word_embeddings:
        tensors.append(OutputTensor(HEAD, dtype, (config.vocab_size, config.hidden_size)))
    return _model(path, Path(name), config_json, tensors)


def shape_model(name: str, form: str) -> Model:
    """The model that `llmcli quantize` would write of a shape, or the bf16 model itself.

    Raises: as `shape_source`
    """
    source = shape_source(name, form)
    scheme = FORMATS[form]
    return source if scheme is None else export_model(plan_export(source, ExportOptions(scheme)))


def export_model(plan: ExportPlan) -> Model:
    """The model that a planned export is going to be."""
    tensors = (tensor for weight in plan.weights for tensor in weight.outputs)
    path = plan.weights[0].info.path
    return _model(path, plan.model.checkpoint.folder, dict(plan.config_json), tensors)


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
