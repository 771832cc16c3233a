"""Models known only by their shape, `configs/models/*.json`: every tensor has a name, a type and a size.

Their exports are known as well, so memory can be planned without a file.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.export_plan import CONFIG_DTYPES, ExportPlan, plan_export
from llmcli.checkpoint.folder import Checkpoint, quantization_of
from llmcli.checkpoint.formats import Awq, Fp8Layer, PackedLayer
from llmcli.checkpoint.layout import HEAD, WEIGHT_DTYPES, ExpectedTensor, expected_tensors
from llmcli.checkpoint.model import Model, match_tensors
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, OutputTensor, TensorInfo
from llmcli.config.llama import LlamaConfig
from llmcli.errors import UsageError
from llmcli.quantization.config import AwqConfig, Fp8Config, Quantization
from llmcli.quantization.schemes import WeightScheme
from llmcli.reading import CONFIG
from llmcli.resources import resource_folder

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
