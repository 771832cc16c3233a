"""Matches the tensors of a folder with what the config asks for, before anything is read."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from llmcli.checkpoint.formats import FP8_DTYPE, Fp8Layer, PackedLayer
from llmcli.checkpoint.layout import (
    BASE_PREFIX,
    EMBEDDING,
    HEAD,
    WEIGHT_DTYPES,
    WEIGHT_SUFFIX,
    ExpectedTensor,
    expected_tensors,
)
from llmcli.checkpoint.quantized_layers import ACTIVATION_SUFFIXES, CODE_SUFFIXES, Layer, find_layers
from llmcli.checkpoint.safetensors_file import TensorInfo, printable
from llmcli.checkpoint.wrapped_names import wrapper_of
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.methods import Quantization, refuse_method

# Old converters stored this table per layer; it is recomputed from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

# What the modules of other forms hold in the place of a weight.
_OTHER_FORMS = {".q_weight": "exl2", ".trellis": "exl3", ".B": "marlin"}

_MAX_NAMED = 4  # tensors named in one message; the rest are counted


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of one model by the model's own names, which each bears whatever its name in the file.

    `unused` names what the model does not use, as the files do. `head` names the output head's weight: the embedding's
    own name where the two share one tensor. `packed` holds the quantized layers by module name
    (`model.layers.0.mlp.up_proj`), `scaled` those of 8-bit floats; their parts stand in `tensors`.
    """

    tensors: Mapping[str, TensorInfo]
    head: str
    unused: tuple[str, ...]
    packed: Mapping[str, PackedLayer]
    scaled: Mapping[str, Fp8Layer] = field(default_factory=dict)

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
            weight = ExpectedTensor(module + WEIGHT_SUFFIX, layer.shape, "", is_linear=True)
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
    that is there is used; without one, tie_word_embeddings shares the embedding. A tied model may also store its one
    matrix as lm_head.weight only. Names may lack the prefix `model.` or bear it twice, as in transformers.
    Raises: CheckpointError naming missing or misshapen tensors; UnsupportedModelError for a dtype that is no weight.
    """
    weights = list(expected_tensors(config))
    stored = tensors
    tensors = _by_own_name(stored, {*(_module(tensor.name) for tensor in weights), _module(HEAD)})
    if config.tie_word_embeddings and HEAD in tensors and EMBEDDING not in tensors:
        tensors = {**tensors, EMBEDDING: tensors[HEAD]}
    has_own_head = tensors.get(HEAD) not in (None, tensors.get(EMBEDDING)) or _has_codes(HEAD, tensors)
    is_shared = config.tie_word_embeddings and not has_own_head
    if not is_shared:
        weights.append(ExpectedTensor(HEAD, weights[0].shape, weights[0].reason, is_linear=True))
    present = set(map(_module, tensors))
    absent = [module for tensor in weights if (module := _module(tensor.name)) not in present]
    if absent and (wrapper := wrapper_of(stored, absent)):
        raise CheckpointError(f"{where}: {wrapper}")
    layers: dict[str, Layer] = {}
    if quantization is not None:
        layers = find_layers(quantization, [tensor for tensor in weights if tensor.is_linear], tensors, where)
    if _has_codes(EMBEDDING, tensors):
        raise UnsupportedModelError(f"{where}: a quantized embedding ({EMBEDDING}) is not supported")
    _refuse_plain(layers, tensors)
    expected = list(_stored_tensors(weights, layers))

    missing = [tensor.name for tensor in expected if tensor.name not in tensors]
    if missing == [HEAD]:
        raise CheckpointError(
            f"{where}: {HEAD} is missing and config.json does not set tie_word_embeddings; "
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
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {_named(missing)}; incomplete download, "
            "or config.json of another model?"
        )
    for tensor in expected:
        if quantization is None and tensor.is_linear and tensors[tensor.name].dtype == FP8_DTYPE:
            raise CheckpointError(
                f"{where}: {tensor.name} holds 8-bit floats, and config.json has no quantization_config, which says "
                "how to read them; download config.json again"
            )
        _check(tensor, tensors[tensor.name])
    used = {tensor.name: replace(tensors[tensor.name], name=tensor.name) for tensor in expected}
    seen = {id(tensors[tensor.name]) for tensor in expected}  # a tied matrix may stand under another name
    names = sorted(name for name, info in stored.items() if id(info) not in seen)
    ignored = (*_IGNORED_SUFFIXES, *ACTIVATION_SUFFIXES) if layers else _IGNORED_SUFFIXES
    unused = tuple(printable(name) for name in names if not name.endswith(ignored))
    packed = {module: layer for module, layer in layers.items() if isinstance(layer, PackedLayer)}
    scaled = {module: layer for module, layer in layers.items() if isinstance(layer, Fp8Layer)}
    return ModelTensors(used, EMBEDDING if is_shared else HEAD, unused, packed, scaled)


def _by_own_name(tensors: Mapping[str, TensorInfo], modules: Collection[str]) -> dict[str, TensorInfo]:
    """Tensors by the names of the model, whose modules are given; one of no module keeps the name it has.

    Where several stand for one, the first in the order of the files' names counts, as in transformers.
    """
    named: dict[str, TensorInfo] = {}
    for name in sorted(tensors):
        module, _, parameter = name.rpartition(".")
        for candidate in (module.removeprefix(BASE_PREFIX), BASE_PREFIX + module):
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
        weight = module + WEIGHT_SUFFIX
        info = tensors.get(weight)
        if info is not None and info.dtype in WEIGHT_DTYPES and not _has_codes(weight, tensors):
            raise UnsupportedModelError(
                f"{weight} in {info.path.name} is {info.dtype}, expected {layer.scheme} as config.json says; "
                "its weights are not quantized yet: use the original model or another export"
            )


def _stored_tensors(weights: list[ExpectedTensor], layers: Mapping[str, Layer]) -> Iterator[ExpectedTensor]:
    for tensor in weights:
        if tensor.is_linear and tensor.layer in layers:
            yield from layers[tensor.layer].tensors(tensor)
        else:
            yield tensor


def _check(tensor: ExpectedTensor, info: TensorInfo) -> None:
    if info.shape not in (tensor.shape, *tensor.other_shapes):
        raise CheckpointError(
            f"{tensor.name} in {info.path.name} is {list(info.shape)}, expected {list(tensor.shape)} "
            f"({tensor.reason} in config.json)"
        )
    if info.dtype not in tensor.dtypes:
        expected = tensor.dtypes[0] if len(tensor.dtypes) == 1 else f"one of {', '.join(tensor.dtypes)}"
        raise UnsupportedModelError(f"{tensor.name} in {info.path.name} is {info.dtype}, expected {expected}")


def _named(names: list[str]) -> str:
    shown = ", ".join(map(printable, names[:_MAX_NAMED]))
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
