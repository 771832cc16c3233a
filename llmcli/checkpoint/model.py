"""Opens a model folder as one value: its files checked, its config read, its tensors matched by name and shape."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from llmcli.checkpoint import formats, layout
from llmcli.checkpoint.adapter import Adapter
from llmcli.checkpoint.folder import Checkpoint, open_checkpoint, quantization_of
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo, listed, printable
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import (
    INT_FORMAT,
    AwqConfig,
    ConfigGroup,
    Fp8Config,
    GptqConfig,
    Quantization,
    QuantizationConfig,
    notes_of,
    refuse_method,
)
from llmcli.quantization.schemes import Fp8Scheme

# Finds the quantized layers of a model: which they are, their scheme and their format, from config and tensors.

# A module with one of these holds codes instead of a weight.
CODE_SUFFIXES = (".weight_packed", ".qweight")
# Scales and zero points of activations and of the KV cache, which are not used here.
ACTIVATION_SUFFIXES = (
    ".activation_scale",
    ".azp_adj",
    ".input_scale_ub",
    *(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point")),
    *(f".{side}_scale" for side in ("q", "k", "v")),
)

Layer = formats.PackedLayer | formats.Fp8Layer


def find_layers(
    quantization: Quantization, linear: Sequence[layout.ExpectedTensor], stored: Mapping[str, TensorInfo], where: str
) -> dict[str, Layer]:
    """The quantized ones of the linear layers `linear`, by module name; `stored` are all tensors by the model's names.

    Raises: CheckpointError for groups that do not divide a layer, and for tensors that contradict the config.
    """
    found: Iterator[tuple[layout.ExpectedTensor, Layer | None]]
    if isinstance(quantization, QuantizationConfig):
        groups = quantization.groups_of([weight.layer for weight in linear], where)
        found = (
            (weight, _listed(group, weight, stored, where)) for weight in linear if (group := groups[weight.layer])
        )
    else:
        # These methods keep layers in 16 bits without listing them, so the tensors of a layer show what it is.
        # Where one lacks its scales, they are missing under the name that the others have.
        scale = max(formats.SCALE_SUFFIXES, key=lambda suffix: sum(name.endswith(f".{suffix}") for name in stored))
        found = ((weight, _told(quantization, weight, stored, where, scale)) for weight in linear)
    layers = {weight.layer: layer for weight, layer in found if layer is not None}
    if not layers and all(weight.name in stored for weight in linear):
        raise CheckpointError(
            f"{where}: config.json says that weights are quantized, and none is; remove quantization_config there if "
            "they are meant to have 16 bits"
        )
    for module, layer in layers.items():
        if isinstance(layer, formats.PackedLayer) and not layer.scheme.divides(layer.shape[1]):
            raise CheckpointError(
                f"{where}: {module} has {layer.shape[1]} inputs, which groups of {layer.scheme.group_size} do not "
                "divide; its quantization_config belongs to another model"
            )
    return layers


def _listed(group: ConfigGroup, weight: layout.ExpectedTensor, stored: Mapping[str, TensorInfo], where: str) -> Layer:
    """A layer that the config of compressed-tensors lists."""
    output_size, input_size = weight.shape
    if isinstance(group.scheme, Fp8Scheme):
        scale = _scale_of(weight.layer, stored, where) or formats.SCALE_SUFFIXES[0]
        return formats.Fp8Layer(group.scheme, (output_size, input_size), scale)
    zero_points = stored.get(f"{weight.layer}.weight_zero_point")
    if zero_points is not None and group.scheme.is_symmetric:  # the library leaves those out that mean nothing
        raise CheckpointError(
            f"{where}: {weight.layer}.weight_zero_point is there, and config.json says that the weights are symmetric; "
            "one of them is wrong: download the model again"
        )
    if group.format == INT_FORMAT:
        return formats.PackedLayer(group.scheme, (output_size, input_size), formats.IntQuantized())
    # An order that is declared must be there; one that is not declared is read too, as it may contradict.
    stores_order = group.has_group_index or f"{weight.layer}.weight_g_idx" in stored
    return formats.PackedLayer(
        group.scheme, (output_size, input_size), formats.PackQuantized(stores_order, group.has_group_index)
    )


def _scale_of(module: str, stored: Mapping[str, TensorInfo], where: str) -> str | None:
    """The name of a layer's scales as 8-bit floats have them, None without any."""
    scales = [suffix for suffix in formats.SCALE_SUFFIXES if f"{module}.{suffix}" in stored]
    if len(scales) > 1:
        raise CheckpointError(
            f"{where}: {module} has both {' and '.join(scales)}, expected one of them; download the model again"
        )
    return scales[0] if scales else None


def _told(
    quantization: AwqConfig | GptqConfig | Fp8Config,
    weight: layout.ExpectedTensor,
    stored: Mapping[str, TensorInfo],
    where: str,
    usual_scale: str,
) -> Layer | None:
    """The kind of a layer by its tensors; None for a plain one."""
    module, (output_size, input_size) = weight.layer, weight.shape
    plain = stored.get(weight.name)
    if isinstance(quantization, Fp8Config):
        scale = _scale_of(module, stored, where)
        if plain is None or plain.dtype in layout.WEIGHT_DTYPES:
            if plain is not None and scale is not None:
                raise CheckpointError(
                    f"{where}: {weight.name} is {plain.dtype}, and there is {module}.{scale}, which belongs to 8-bit "
                    "floats; one of them is wrong: download the model again"
                )
            return None
        scheme = quantization.scheme or _scheme_of_scales(stored.get(f"{module}.{scale}"), output_size)
        return formats.Fp8Layer(scheme, (output_size, input_size), scale or usual_scale)
    has_codes = f"{module}.qweight" in stored
    if not has_codes and (plain is not None or not any(f"{module}.{part}" in stored for part in ("qzeros", "scales"))):
        return None
    if plain is not None:
        raise CheckpointError(
            f"{where}: {module} has both weight and qweight, expected one of them; download the model again"
        )
    if isinstance(quantization, AwqConfig):
        if output_size % formats.AWQ_WORD_COLUMNS:
            raise UnsupportedModelError(
                f"{where}: {module} has {output_size} outputs, which AWQ cannot pack by "
                f"the {formats.AWQ_WORD_COLUMNS}; config.json of another model?"
            )
        return formats.PackedLayer(quantization.scheme, (output_size, input_size), formats.Awq())
    orders_inputs = quantization.orders_inputs
    form = formats.Gptq(quantization.zero_offset, bool(orders_inputs) or f"{module}.g_idx" in stored, orders_inputs)
    return formats.PackedLayer(quantization.scheme, (output_size, input_size), form)


def _scheme_of_scales(scales: TensorInfo | None, output_size: int) -> Fp8Scheme:
    """One scale or one a row: configs without blocks do not say, so the shape decides."""
    is_of_rows = scales is not None and output_size > 1 and scales.shape in ((output_size,), (output_size, 1))
    return Fp8Scheme(1 if is_of_rows else None, None)


# Parts that wrappers of a model add to tensors' names, in front or within, and what writes them.

_WRITERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "module": "DataParallel or DeepSpeed",
    "base_model": "peft",
    "language_model": "a model for images and text",
}
_OTHER_WRITER = "a program that has the model as a part of its own"


def wrapper_of(names: Iterable[str], modules: Sequence[str]) -> str | None:
    """If the model's `modules` are absent: what tensors' names contain instead, what wrote it, and the next step.

    None where the names have nothing of this kind: the modules are really absent.
    """
    wanted = [module.removeprefix(layout.BASE_PREFIX) for module in modules]
    for name in names:
        module = name.rpartition(".")[0]
        parts = module.split(".")
        known = [part for part in parts if part in _WRITERS]
        bare = ".".join(part for part in parts if part not in _WRITERS)
        own = bare.removeprefix(layout.BASE_PREFIX).removeprefix(layout.BASE_PREFIX) if known else wanted[0]
        if own not in wanted:
            continue
        if module.endswith(f".{own}"):
            wrapper = module.removesuffix(own)
            if layout.BASE_PREFIX + own in modules and wrapper.endswith(f".{layout.BASE_PREFIX}"):
                wrapper = wrapper.removesuffix(layout.BASE_PREFIX)
        elif known:
            wrapper = ".".join(known) + "."
        else:
            continue
        writer = _WRITERS[known[0]] if known else _OTHER_WRITER
        fix = f"save the model inside it, or remove {printable(wrapper)} from the names"
        if writer == "peft":
            fix = "merge the adapter with peft's merge_and_unload, and save that"
        return f"{printable(wrapper)} in the names of its tensors ({printable(name)}) comes from {writer}; {fix}"
    return None


# Matches the tensors of a folder with what the config asks for, before anything is read.

# Old converters stored this table per layer; it is recomputed from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

# What the modules of other formats hold instead of a weight.
_OTHER_FORMS = {".q_weight": "exl2", ".trellis": "exl3", ".B": "marlin"}


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of one model by the model's own names, whatever their names in the file.

    `unused` names what the model does not use, as the files do. `head` names the output head's weight: the embedding's
    own name where the two share one tensor. `packed` holds the quantized layers by module name
    (`model.layers.0.mlp.up_proj`), `scaled` those of 8-bit floats; their parts are in `tensors`.
    """

    tensors: Mapping[str, TensorInfo]
    head: str
    unused: tuple[str, ...]
    packed: Mapping[str, formats.PackedLayer]
    scaled: Mapping[str, formats.Fp8Layer] = field(default_factory=dict)

    @property
    def quantized(self) -> dict[str, Layer]:
        """All layers that are not stored as plain weights, by module name."""
        return {**self.packed, **self.scaled}

    @property
    def sources(self) -> dict[str, tuple[TensorInfo, ...]]:
        """What is read together, in the order of the files: plain tensors by name, quantized layers by module name.

        A layer stands where the first of its tensors does.
        """
        sources: dict[str, tuple[TensorInfo, ...]] = {}
        left = dict(self.tensors)
        for module, layer in self.quantized.items():
            weight = layout.ExpectedTensor(module + layout.WEIGHT_SUFFIX, layer.shape, "", is_linear=True)
            sources[module] = tuple(left.pop(tensor.name) for tensor in layer.tensors(weight))
        sources |= {name: (info,) for name, info in left.items()}
        places = {source: min((info.path, info.offset) for info in infos) for source, infos in sources.items()}
        return {source: sources[source] for source in sorted(sources, key=places.__getitem__)}


def match_tensors(
    config: LlamaConfig,
    tensors: Mapping[str, TensorInfo],
    where: str,
    quantization: Quantization | None = None,
) -> ModelTensors:
    """Match a folder's tensors with what the config asks for.

    The stored tensors decide about the head, then the config, as in Hugging Face's tie_weights: an lm_head.weight
    is used if present; without one, tie_word_embeddings shares the embedding. A tied model may also store its one
    matrix as lm_head.weight only. Names may lack the prefix `model.` or bear it twice, as in transformers.
    Raises: CheckpointError naming missing or misshapen tensors; UnsupportedModelError for a dtype of no weight.
    """
    weights = list(layout.expected_tensors(config))
    stored = tensors
    tensors = _by_own_name(stored, {*(_module(tensor.name) for tensor in weights), _module(layout.HEAD)})
    if config.tie_word_embeddings and layout.HEAD in tensors and layout.EMBEDDING not in tensors:
        tensors = {**tensors, layout.EMBEDDING: tensors[layout.HEAD]}
    has_own_head = tensors.get(layout.HEAD) not in (None, tensors.get(layout.EMBEDDING)) or _has_codes(
        layout.HEAD, tensors
    )
    is_shared = config.tie_word_embeddings and not has_own_head
    if not is_shared:
        weights.append(layout.ExpectedTensor(layout.HEAD, weights[0].shape, weights[0].reason, is_linear=True))
    present = set(map(_module, tensors))
    absent = [module for tensor in weights if (module := _module(tensor.name)) not in present]
    if absent and (wrapper := wrapper_of(stored, absent)):
        raise CheckpointError(f"{where}: {wrapper}")
    layers: dict[str, Layer] = {}
    if quantization is not None:
        layers = find_layers(quantization, [tensor for tensor in weights if tensor.is_linear], tensors, where)
    if _has_codes(layout.EMBEDDING, tensors):
        raise UnsupportedModelError(f"{where}: a quantized embedding ({layout.EMBEDDING}) is not supported")
    _refuse_plain(layers, tensors)
    expected = list(_stored_tensors(weights, layers))

    missing = [tensor.name for tensor in expected if tensor.name not in tensors]
    if missing == [layout.HEAD]:
        raise CheckpointError(
            f"{where}: {layout.HEAD} is missing and config.json does not set tie_word_embeddings; "
            "if the head shares the embedding, set tie_word_embeddings to true there"
        )
    codes = next((name for name in missing if _has_codes(name, tensors)), None)
    if codes is not None and quantization is None:
        raise CheckpointError(
            f"{where}: {_module(codes)} holds codes instead of weights, and config.json has no quantization_config, "
            "which says how to read them; download config.json again"
        )
    if missing:
        for suffix, method in _OTHER_FORMS.items():
            other = next((other for name in missing if (other := _module(name) + suffix) in tensors), None)
            if other is not None:
                refuse_method(method, f"{where}: {printable(other)}")
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {listed(missing)}; incomplete download, "
            "or config.json of another model?"
        )
    for tensor in expected:
        if quantization is None and tensor.is_linear and tensors[tensor.name].dtype == formats.FP8_DTYPE:
            raise CheckpointError(
                f"{where}: {tensor.name} holds 8-bit floats, and config.json has no quantization_config, which says "
                "how to read them; download config.json again"
            )
        _check(tensor, tensors[tensor.name])
    used = {tensor.name: replace(tensors[tensor.name], name=tensor.name) for tensor in expected}
    seen = {id(tensors[tensor.name]) for tensor in expected}  # a tied matrix may have another name
    names = sorted(name for name, info in stored.items() if id(info) not in seen)
    ignored = (*_IGNORED_SUFFIXES, *ACTIVATION_SUFFIXES) if layers else _IGNORED_SUFFIXES
    unused = tuple(printable(name) for name in names if not name.endswith(ignored))
    packed = {module: layer for module, layer in layers.items() if isinstance(layer, formats.PackedLayer)}
    scaled = {module: layer for module, layer in layers.items() if isinstance(layer, formats.Fp8Layer)}
    return ModelTensors(used, layout.EMBEDDING if is_shared else layout.HEAD, unused, packed, scaled)


def _by_own_name(tensors: Mapping[str, TensorInfo], modules: Collection[str]) -> dict[str, TensorInfo]:
    """Tensors by the names of the model, with its modules given; a tensor of no module keeps its name.

    Of several for one, the first in the order of the files' names counts, as in transformers.
    """
    named: dict[str, TensorInfo] = {}
    for name in sorted(tensors):
        module, _, parameter = name.rpartition(".")
        for candidate in (module.removeprefix(layout.BASE_PREFIX), layout.BASE_PREFIX + module):
            if candidate in modules:
                module = candidate
                break
        named.setdefault(f"{module}.{parameter}" if module else parameter, tensors[name])
    return named


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _has_codes(weight: str, tensors: Collection[str]) -> bool:
    return any(_module(weight) + suffix in tensors for suffix in CODE_SUFFIXES)


def _refuse_plain(layers: Mapping[str, Layer], tensors: Mapping[str, TensorInfo]) -> None:
    """Raises: UnsupportedModelError for a layer that the config calls quantized, and that holds a plain weight"""
    for module, layer in layers.items():
        weight = module + layout.WEIGHT_SUFFIX
        info = tensors.get(weight)
        if info is not None and info.dtype in layout.WEIGHT_DTYPES and not _has_codes(weight, tensors):
            raise UnsupportedModelError(
                f"{weight} in {info.path.name} is {info.dtype}, expected {layer.scheme} as config.json says; "
                "its weights are not quantized yet: use the original model or another export"
            )


def _stored_tensors(
    weights: list[layout.ExpectedTensor], layers: Mapping[str, Layer]
) -> Iterator[layout.ExpectedTensor]:
    for tensor in weights:
        if tensor.is_linear and tensor.layer in layers:
            yield from layers[tensor.layer].tensors(tensor)
        else:
            yield tensor


def _check(tensor: layout.ExpectedTensor, info: TensorInfo) -> None:
    if info.shape not in (tensor.shape, *tensor.other_shapes):
        raise CheckpointError(
            f"{tensor.name} in {info.path.name} is {list(info.shape)}, expected {list(tensor.shape)} "
            f"({tensor.reason} in config.json)"
        )
    if info.dtype not in tensor.dtypes:
        expected = tensor.dtypes[0] if len(tensor.dtypes) == 1 else f"one of {', '.join(tensor.dtypes)}"
        raise UnsupportedModelError(f"{tensor.name} in {info.path.name} is {info.dtype}, expected {expected}")


@dataclass(frozen=True)
class Model:
    """A model folder that passed every check that needs no weights. `notes` are sentences that users should know.

    `adapters` are those that have changed its tensors.
    """

    checkpoint: Checkpoint
    config: LlamaConfig
    tensors: ModelTensors
    notes: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def input_orders(self) -> Mapping[str, formats.Array]:
        """The input that each column of a layer belongs to once its codes are sorted, by module name; read once.

        Layers that group neighbouring inputs are not in it.
        Shapes: int64 [input_size]
        Raises: CheckpointError for read errors, and for an order that contradicts something
        """
        with TensorReader() as reader:
            return formats.read_orders(self.tensors.packed, self.tensors.tensors, reader)


def open_model(folder: Path) -> Model:
    """Open and check a Hugging Face model folder.

    Raises: CheckpointError or a subclass, for everything that can be wrong with the folder but the weights' values.
    """
    checkpoint = open_checkpoint(folder)
    where = str(folder / "config.json")
    config = LlamaConfig.from_dict(checkpoint.config_json, where)
    quantization = quantization_of(checkpoint.config_json, where)
    tensors = match_tensors(config, checkpoint.tensors, str(folder), quantization)
    if config.tie_word_embeddings and tensors.head in tensors.tensors and tensors.head != layout.EMBEDDING:
        tensors = _share_equal_head(tensors)
    return Model(checkpoint, config, tensors, (*config.notes, *notes_of(quantization)))


def num_parameters(model: Model) -> int:
    """Weights of a model, a matrix that serves as embedding and as head counted once."""
    layers = model.tensors.quantized
    plain = (
        info
        for name, info in model.tensors.tensors.items()
        if name.rpartition(".")[0] not in layers or name.endswith(".bias")
    )
    return sum(math.prod(info.shape) for info in plain) + sum(math.prod(layer.shape) for layer in layers.values())


def _share_equal_head(tensors: ModelTensors) -> ModelTensors:
    """A tied model that stores both matrices: one buffer serves if they are equal, else the stored head counts."""
    embedding, head = tensors.tensors[layout.EMBEDDING], tensors.tensors[tensors.head]
    with TensorReader() as reader:
        if not reader.is_equal(embedding, head):
            return tensors
    used = {name: info for name, info in tensors.tensors.items() if info is not head}
    return replace(tensors, tensors=used, head=layout.EMBEDDING)
