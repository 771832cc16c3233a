"""Decides what an export or a conversion holds, before a byte is read: schemes of tensors, shards, sizes."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any

from llmcli import __version__
from llmcli.checkpoint.folder import WEIGHTS_NAME, SourceState
from llmcli.checkpoint.formats import PackedLayer, PackQuantized
from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_DTYPES, WEIGHT_SUFFIX
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.safetensors_file import OutputTensor, TensorInfo
from llmcli.errors import CheckpointError, UnsupportedModelError, UsageError
from llmcli.patterns import match_names
from llmcli.quantization.config import ConfigGroup, QuantizationConfig
from llmcli.quantization.schemes import DEFAULT_SHARD_BYTES, ExportOptions, WeightScheme, vllm_concerns

# `PlannedWeight`: one tensor of an export, before it is written; `Shard`: those that share a file.

LINEAR_SUFFIX = "_proj.weight"


@dataclass(frozen=True)
class PlannedWeight:
    """A tensor of the export by its name there, where it comes from, and how it is quantized: None copies it.

    With a `layer` it is quantized in the source already: `parts` are its tensors there, `info` the first of them.
    With `stores_order` the group of each input is written, too.
    """

    name: str
    info: TensorInfo
    scheme: WeightScheme | None
    scale_dtype: str
    layer: PackedLayer | None = None
    parts: tuple[TensorInfo, ...] = ()
    stores_order: bool = False

    @property
    def module(self) -> str:
        """The module's name, as config.json lists it."""
        return self.name.removesuffix(WEIGHT_SUFFIX)

    @property
    def shape(self) -> tuple[int, int]:
        """[output_size, input_size] of a linear weight."""
        if self.layer is not None:
            return self.layer.shape
        output_size, input_size = self.info.shape
        return output_size, input_size

    @property
    def kind(self) -> str:
        """Its row in the table of sizes."""
        if self.name == EMBEDDING:
            return "embedding"
        if self.name == HEAD:
            return "output head"
        if self.name.endswith(LINEAR_SUFFIX):
            return "attention" if ".self_attn." in self.name else "MLP"
        return "norms and biases"

    @cached_property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The tensors written for it."""
        if self.scheme is None:
            return (OutputTensor(self.name, self.info.dtype, self.info.shape),)
        tensors = [
            OutputTensor(f"{self.name}_packed", "I32", self.scheme.packed_shape(self.shape)),
            OutputTensor(f"{self.name}_scale", self.scale_dtype, self.scheme.scale_shape(self.shape)),
            OutputTensor(f"{self.name}_shape", "I64", (2,)),
        ]
        if not self.scheme.is_symmetric:
            tensors.append(OutputTensor(f"{self.name}_zero_point", "I32", self.scheme.zero_point_shape(self.shape)))
        if self.stores_order:
            tensors.append(OutputTensor(f"{self.name}_g_idx", "I32", (self.shape[1],)))
        return tuple(tensors)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(info.num_bytes for info in self.parts or (self.info,))

    @property
    def stored_bytes(self) -> int:
        """Its size in the source."""
        return sum(info.stored_bytes for info in self.parts or (self.info,))

    @property
    def num_bytes(self) -> int:
        """Its size in the export."""
        return sum(tensor.num_bytes for tensor in self.outputs)


@dataclass(frozen=True)
class Shard:
    """One weight file of the export."""

    file_name: str
    weights: tuple[PlannedWeight, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes of the source that are read for it."""
        return sum(weight.source_bytes for weight in self.weights)


CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_MAX_NAMED = 3


@dataclass(frozen=True)
class Sizes:
    """Tensors of one kind, before and after."""

    num_tensors: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ExportPlan:
    """Everything about an export but its values. `channel_layers` have no whole groups; `skipped` stay unquantized.

    `options` is None for a conversion, which copies the source's codes.
    """

    model: Model
    source: SourceState
    options: ExportOptions | None
    shards: tuple[Shard, ...]
    config_json: Mapping[str, Any]
    channel_layers: tuple[str, ...]
    skipped: tuple[str, ...]
    concerns: tuple[str, ...]

    @property
    def weights(self) -> tuple[PlannedWeight, ...]:
        """All tensors, in the order of writing."""
        return tuple(weight for shard in self.shards for weight in shard.weights)

    @property
    def sizes(self) -> dict[str, Sizes]:
        """Sizes by kind of tensor; a head that shared the embedding takes nothing before."""
        kinds: dict[str, list[PlannedWeight]] = {}
        for weight in self.weights:
            kinds.setdefault(weight.kind, []).append(weight)
        return {
            kind: Sizes(
                len(weights),
                sum(0 if weight.name == HEAD and self.unties_head else weight.stored_bytes for weight in weights),
                sum(weight.num_bytes for weight in weights),
            )
            for kind, weights in kinds.items()
        }

    @property
    def total(self) -> Sizes:
        """Sizes of the whole model."""
        parts = self.sizes.values()
        return Sizes(
            sum(part.num_tensors for part in parts),
            sum(part.bytes_before for part in parts),
            sum(part.bytes_after for part in parts),
        )

    @property
    def stores_order(self) -> bool:
        """Whether layers store the group of each input."""
        return any(weight.stores_order for weight in self.weights)

    @property
    def unties_head(self) -> bool:
        """Whether the source's one matrix for embedding and head becomes two."""
        is_shared = self.model.tensors.head == EMBEDDING
        return is_shared and self.options is not None and self.options.head_bits is not None

    def check_sources(self) -> None:
        """Refuse a source, or an adapter, that has changed. Raises: CheckpointError"""
        for state in (self.source, *(adapter.state for adapter in self.model.adapters)):
            state.check()

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two plans whose shards are the same bytes: same weight files, same choices, same program.

        The small files that are copied do not count: they are copied anew by every run.
        """
        facts: dict[str, Any] = {
            "version": __version__,
            "options": None if self.options is None else asdict(self.options),
            "config": self.config_json,
            "weights": [
                (weight.name, str(info.path.resolve()), info.offset, info.num_bytes)
                for weight in self.weights
                for info in weight.parts or (weight.info,)
            ],
            "files": {name: astuple(state) for name, state in self.source.weight_files.items()},
        }
        if self.model.adapters:
            facts["adapters"] = [
                (
                    adapter.weight,
                    str(adapter.folder.resolve()),
                    {name: astuple(state) for name, state in adapter.state.files.items()},
                )
                for adapter in self.model.adapters
            ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan_export(model: Model, options: ExportOptions, source: SourceState | None = None) -> ExportPlan:
    """Plan the export of a model whose folder has been checked.

    `source` is the folder as it was before the model was opened; without it, as it is now.
    Raises: UsageError for choices that fit the model or one another badly; CheckpointError for a model that is
    quantized already.
    """
    config_json = model.checkpoint.config_json
    if config_json.get("quantization_config") or config_json.get("compression_config"):
        raise CheckpointError(f"{model.checkpoint.folder} is quantized already; quantize the original model instead")
    scale_dtype = CONFIG_DTYPES.get(str(config_json.get("dtype") or config_json.get("torch_dtype")))
    sources = dict(model.tensors.tensors)
    if options.head_bits is not None:
        sources.setdefault(HEAD, sources[EMBEDDING])
    skipped = _skipped(sources, options.skip)
    weights = [
        PlannedWeight(name, info, _scheme_for(name, info, options, skipped), scale_dtype or info.dtype)
        for name, info in sources.items()
    ]
    quantized = {weight.module: weight for weight in weights if weight.scheme is not None}
    if not quantized:
        raise UsageError(
            "nothing to quantize: every linear layer is skipped and the output head kept; skip fewer layers"
        )
    channel_layers = tuple(
        name for name, weight in quantized.items() if weight.scheme and weight.scheme.group_size is None
    )
    if options.scheme.group_size is None:
        channel_layers = ()  # the user's choice
    if not options.scheme.is_symmetric:
        _refuse_mixed_asymmetric(options, channel_layers, quantized)
    return ExportPlan(
        model=model,
        source=source or SourceState.record(model.checkpoint.folder),
        options=options,
        shards=fill_shards(weights, options.shard_bytes),
        config_json=_config_json(
            model,
            quantization_config_of(weights, options.scheme, skipped),
            is_head_quantized=options.head_bits is not None,
        ),
        channel_layers=channel_layers,
        skipped=skipped,
        concerns=vllm_concerns_of(weights),
    )


def vllm_concerns_of(weights: Sequence[PlannedWeight]) -> tuple[str, ...]:
    """What vLLM may not accept in an export."""
    linear = {weight.module: weight for weight in weights if weight.kind in ("attention", "MLP", "output head")}
    schemes = {name: weight.scheme for name, weight in linear.items()}
    shapes = {name: weight.shape for name, weight in linear.items()}
    return tuple(vllm_concerns(schemes, shapes, HEAD.removesuffix(WEIGHT_SUFFIX)))


def _skipped(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The linear layers that a pattern matches anywhere in the module's name."""
    layers = [name.removesuffix(WEIGHT_SUFFIX) for name in names if name.endswith(LINEAR_SUFFIX)]
    skipped = set()
    for pattern, matched in match_names(patterns, layers, "--skip", UsageError, anywhere=True).items():
        if not matched:
            raise UsageError(f"--skip {pattern!r} matches no linear layer; their names look like {layers[0]}")
        skipped |= matched
    return tuple(layer for layer in layers if layer in skipped)


def _scheme_for(name: str, info: TensorInfo, options: ExportOptions, skipped: tuple[str, ...]) -> WeightScheme | None:
    if name == HEAD and options.head_bits is not None:
        scheme = WeightScheme(options.head_bits, options.scheme.group_size)
    elif name.endswith(LINEAR_SUFFIX) and name.removesuffix(WEIGHT_SUFFIX) not in skipped:
        scheme = options.scheme
    else:
        return None
    if scheme.divides(info.shape[1]):
        return scheme
    return WeightScheme(scheme.num_bits, None, scheme.is_symmetric)


def _refuse_mixed_asymmetric(
    options: ExportOptions, channel_layers: tuple[str, ...], quantized: Mapping[str, PlannedWeight]
) -> None:
    reason = "transformers loads asymmetric weights only if one scheme covers every quantized layer"
    if options.head_bits is not None:
        raise UsageError(f"--asymmetric and --head int8 cannot be combined: {reason}")
    if channel_layers:
        shown = ", ".join(channel_layers[:_MAX_NAMED])
        num_inputs = quantized[channel_layers[0]].shape[1]
        raise UsageError(
            "--asymmetric needs a --group-size that divides the input size of every layer; "
            f"{options.scheme.group_size} does not divide the {num_inputs} inputs of {shown}: {reason}; "
            "use a smaller --group-size, or --skip them"
        )


def quantization_config_of(
    weights: Sequence[PlannedWeight], chosen: WeightScheme, skipped: tuple[str, ...]
) -> QuantizationConfig:
    """One group for the `chosen` scheme, one for each other (of layers it does not divide), one for the head."""
    layers: dict[WeightScheme, list[PlannedWeight]] = {}
    for weight in weights:
        if weight.scheme is not None and weight.name != HEAD:
            layers.setdefault(weight.scheme, []).append(weight)
    groups = [
        ConfigGroup(
            targets=("Linear",) if scheme == chosen else tuple(weight.module for weight in alike),
            scheme=scheme,
            has_group_index=any(weight.stores_order for weight in alike),
        )
        for scheme, alike in sorted(layers.items(), key=lambda item: item[0] != chosen)
    ]
    head = HEAD.removesuffix(WEIGHT_SUFFIX)
    # vLLM knows the head by its name, not as a Linear, so it has a group of its own even if its scheme is the same.
    head_groups = [
        ConfigGroup((head,), weight.scheme, has_group_index=weight.stores_order)
        for weight in weights
        if weight.name == HEAD and weight.scheme is not None
    ]
    return QuantizationConfig((*groups, *head_groups), ignore=skipped if head_groups else (*skipped, head))


def _config_json(model: Model, quantization: QuantizationConfig, *, is_head_quantized: bool) -> dict[str, Any]:
    config_json = {**model.checkpoint.config_json, "quantization_config": quantization.to_dict()}
    has_own_head = model.adapters and model.tensors.head == HEAD  # an adapter brings a copy
    if model.config.tie_word_embeddings and (is_head_quantized or has_own_head):
        config_json["tie_word_embeddings"] = False  # with true, transformers looks for no head in the file
    return config_json


def fill_shards(weights: Sequence[PlannedWeight], shard_bytes: int) -> tuple[Shard, ...]:
    """Fill shards in order; a weight larger than a shard has one of its own."""
    shards: list[list[PlannedWeight]] = [[]]
    room = shard_bytes
    for weight in weights:
        if weight.num_bytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    if len(shards) == 1:
        return (Shard(WEIGHTS_NAME, tuple(weights)),)
    count = len(shards)
    return tuple(
        Shard(f"model-{number:05}-of-{count:05}.safetensors", tuple(shard)) for number, shard in enumerate(shards, 1)
    )


# Decides what a conversion holds: a quantized model written as compressed-tensors `pack-quantized`, code for code.

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
    floats, which are not codes; CheckpointError for an order of inputs that cannot be read, or contradicts something.
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
