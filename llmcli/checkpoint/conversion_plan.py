"""Decides what a conversion holds: a quantized model written as compressed-tensors `pack-quantized`, code for code."""

from collections import Counter

from llmcli.checkpoint.export_options import DEFAULT_SHARD_BYTES
from llmcli.checkpoint.export_plan import ExportPlan, fill_shards, quantization_config_of, vllm_concerns_of
from llmcli.checkpoint.folder import SourceState
from llmcli.checkpoint.formats import PackQuantized
from llmcli.checkpoint.layout import WEIGHT_DTYPES, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.planned_weight import LINEAR_SUFFIX, PlannedWeight
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import UnsupportedModelError, UsageError

_ORDER_CONCERN = (
    "inputs have an order of their own (desc_act): transformers loads the model with compressed-tensors 0.15.0 and "
    "without dequantize=True, which drops the order; from 0.19 on compressed-tensors refuses the model, in vLLM too"
)


def plan_conversion(
    model: Model, source: SourceState | None = None, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ExportPlan:
    """Plan the conversion of a model whose folder has been checked.

    `source` is the folder as it was before the model was opened; without it, as it is now.
    Raises: UsageError for a model that is not quantized, or in that form already; UnsupportedModelError for 8-bit
    floats, which are no codes; CheckpointError for an order of inputs that cannot be read, or contradicts something.
    """
    tensors, folder = model.tensors, model.checkpoint.folder
    if tensors.scaled:
        raise UnsupportedModelError(
            f"{folder} holds 8-bit floats, which have no integer codes; quantize the original model with "
            "`llmcli quantize`"
        )
    if not tensors.packed:
        raise UsageError(f"{folder} is not quantized, so there is nothing to convert; `llmcli quantize` quantizes it")
    if all(isinstance(layer.format, PackQuantized) for layer in tensors.packed.values()):
        raise UsageError(f"{folder} is compressed-tensors pack-quantized already; use it as it is")
    has_orders = bool(model.input_orders)
    # Where one layer has an order, all store theirs: loaders want one form of a scheme.
    weights = [_planned(model, name, parts, stores_order=has_orders) for name, parts in tensors.sources.items()]
    schemes = Counter(layer.scheme for layer in tensors.packed.values())
    kept = tuple(weight.module for weight in weights if weight.scheme is None and weight.name.endswith(LINEAR_SUFFIX))
    config_json = {key: value for key, value in model.checkpoint.config_json.items() if key != "compression_config"}
    declared = quantization_config_of(weights, schemes.most_common(1)[0][0], kept)
    return ExportPlan(
        model=model,
        source=source or SourceState.record(folder),
        options=None,
        shards=fill_shards(weights, shard_bytes),
        config_json={**config_json, "quantization_config": declared.to_dict()},
        channel_layers=(),
        skipped=kept,
        concerns=(*vllm_concerns_of(weights), *([_ORDER_CONCERN] if has_orders else [])),
    )


def _planned(model: Model, source: str, parts: tuple[TensorInfo, ...], *, stores_order: bool) -> PlannedWeight:
    layer = model.tensors.packed.get(source)
    if layer is None:
        (info,) = parts
        return PlannedWeight(source, info, None, info.dtype)
    scale_dtype = next(info.dtype for info in parts if info.dtype in WEIGHT_DTYPES)
    return PlannedWeight(
        source + WEIGHT_SUFFIX,
        parts[0],
        layer.scheme,
        scale_dtype,
        layer,
        parts,
        stores_order=stores_order and layer.scheme.group_size is not None,
    )
