"""Adds adapters to a model: matches each of their tensors with the base model's before a weight is read.

A changed tensor becomes a `MergedTensor`, computed as it is read; runners and the exporter read it as any other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmcli.checkpoint.adapter import ADAPTER_WEIGHTS_NAME, Adapter, Target, find_targets, is_saved
from llmcli.checkpoint.folder import mlx_adapter_error
from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_DTYPES, WEIGHT_SUFFIX, expected_tensors
from llmcli.checkpoint.model import Model, ModelTensors, wrapper_of
from llmcli.checkpoint.reader import LowRankUpdate, MergedTensor, TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo, printable
from llmcli.errors import CheckpointError, UnsupportedModelError

_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer."
_EMBEDDING_MODULE = EMBEDDING.removesuffix(WEIGHT_SUFFIX)
_HEAD_MODULE = HEAD.removesuffix(WEIGHT_SUFFIX)
_ENDS = (_EMBEDDING_MODULE, _HEAD_MODULE)
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(?(embedding)|\.weight)")


def merge_adapters(model: Model, adapters: Sequence[Adapter]) -> Model:
    """The model with the adapters, in their order; no weight is read.

    Raises: UnsupportedModelError for a quantized model, and what cannot be added; CheckpointError naming a tensor of an
    adapter that contradicts its config or the model
    """
    if not adapters:
        return model
    folder = model.checkpoint.folder
    if model.tensors.quantized:
        raise UnsupportedModelError(
            f"{folder} is quantized, and an adapter is added to 16-bit weights; give the 16-bit model, or quantize it "
            f"with the adapter: `llmcli quantize BASE DST --adapter {adapters[0].name}`, where BASE is the 16-bit model"
        )
    changes: dict[str, _Change] = {}
    tensors = model.tensors
    for adapter in adapters:
        tensors = _with_own_head(tensors, adapter)
        _Matching(model, tensors, adapter).collect(changes)
    merged = {name: changes[name].merged(info) if name in changes else info for name, info in tensors.tensors.items()}
    return replace(model, tensors=replace(tensors, tensors=merged), adapters=tuple(adapters))


@dataclass
class _Change:
    """What adapters do to one tensor."""

    source: TensorInfo | None = None
    updates: list[LowRankUpdate] = field(default_factory=list)

    def merged(self, base: TensorInfo) -> MergedTensor:
        place = (base.name, base.dtype, base.shape, base.path, base.offset, base.num_bytes)
        return MergedTensor(*place, self.source or base, tuple(self.updates))


class _Matching:
    """One adapter's tensors, matched with its config and with the base model's."""

    def __init__(self, model: Model, base: ModelTensors, adapter: Adapter):
        self._base = base.tensors
        self._adapter = adapter
        self._is_tied = base.head == EMBEDDING
        self._where = f"{adapter.name}/{ADAPTER_WEIGHTS_NAME}"
        modules = [tensor.layer for tensor in expected_tensors(model.config) if tensor.is_linear]
        self._targets = find_targets(adapter.config, modules, (_EMBEDDING_MODULE, _HEAD_MODULE), adapter.name)

    def collect(self, changes: dict[str, _Change]) -> None:
        """Add what the adapter changes to `changes`, by the names of the model's tensors."""
        factors: dict[tuple[str, str], TensorInfo] = {}
        replaced: dict[str, TensorInfo] = {}
        for stored_name, info in self._adapter.tensors.items():
            name = stored_name.removeprefix(_PREFIX)
            if info.dtype not in WEIGHT_DTYPES:
                raise UnsupportedModelError(
                    f"{self._where}: {printable(info.name)} is {info.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}"
                )
            if match := _FACTOR.fullmatch(name):
                factors[self._target_of(match["module"], bool(match["embedding"]), info), match["factor"]] = info
            else:
                own_name = self._replaced_name(name, info)
                if own_name in replaced:  # embedding and head, which are one matrix
                    self._require_equal(replaced[own_name], info)
                replaced[own_name] = info
        for name in self._base:
            is_shared = name == HEAD and self._adapter.config.ties_weights
            if name not in replaced and not is_shared and is_saved(self._adapter.config, name.rpartition(".")[0]):
                raise CheckpointError(f"{self._where} lacks {name}, which modules_to_save in its config names")
        for module, target in self._targets.items():
            name = module + WEIGHT_SUFFIX
            self._change(changes, name).updates.append(self._update(module, target, factors))
        for name, info in replaced.items():
            change = self._change(changes, name)
            if change.source is not None or self._adapter.weight != 1:
                raise UnsupportedModelError(
                    f"{self._where}: {printable(info.name)} replaces {name}, so the adapter cannot have a weight, nor "
                    "can another adapter replace it; give one adapter without a weight"
                )
            change.source = info

    def _change(self, changes: dict[str, _Change], name: str) -> _Change:
        return changes.setdefault(name, _Change())

    def _target_of(self, module: str, is_embedding: bool, info: TensorInfo) -> str:
        if module not in self._targets:
            if self._targets and (wrapper := wrapper_of([module + WEIGHT_SUFFIX], list(self._targets))):
                raise CheckpointError(f"{self._where}: {wrapper}")
            what = "a layer that the base model does not have"
            if module + WEIGHT_SUFFIX in self._base or module == _HEAD_MODULE:
                what = "a layer that target_modules in its config leave out"
            raise self._error(info, f"belongs to {what}; is it the adapter of another model?")
        if is_embedding != (module == _EMBEDDING_MODULE):
            raise self._error(info, "is not of the kind of its layer, embedding or linear; the adapter is damaged")
        if self._is_tied and module in _ENDS:
            raise self._shared(info)
        return module

    def _shared(self, info: TensorInfo) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._where}: {printable(info.name)} changes a matrix that the base model has as embedding and as "
            "output head, where peft gives another result once it is merged; it is not supported"
        )

    def _require_equal(self, first: TensorInfo, second: TensorInfo) -> None:
        with TensorReader() as reader:
            if reader.is_equal(first, second):
                return
        raise UnsupportedModelError(
            f"{self._where}: {printable(first.name)} and {printable(second.name)} differ, and the base model has one "
            "matrix for both; it is not supported"
        )

    def _replaced_name(self, name: str, info: TensorInfo) -> str:
        """The model's tensor that an adapter's tensor replaces."""
        own_name, config = name.replace(_BASE_LAYER, "."), self._adapter.config
        if self._is_tied and own_name in (EMBEDDING, HEAD):
            if _BASE_LAYER in name:  # it has factors
                raise self._shared(info)
            own_name = EMBEDDING
        if own_name.endswith((".lora_a", ".lora_b")):
            raise mlx_adapter_error(self._where)
        if own_name not in self._base:
            raise self._error(info, "is not a tensor that the base model has; is it the adapter of another model?")
        module, _, parameter = own_name.rpartition(".")
        is_named = is_saved(config, module)
        if parameter == "bias":
            is_named = is_named or config.bias == "all" or (config.bias == "lora_only" and module in self._targets)
        # peft saves embedding and head unasked if they have factors, or if it sees that the vocabulary was changed.
        if not is_named and own_name not in (EMBEDDING, HEAD):
            raise self._error(info, "replaces a tensor that neither modules_to_save nor bias in its config name")
        if module in _ENDS and info.shape[1:] == self._base[own_name].shape[1:]:
            self._check_vocabulary(info, 0, self._base[own_name])
        self._check_shape(info, self._base[own_name].shape, f"the base model's {own_name}")
        return own_name

    def _check_vocabulary(self, info: TensorInfo, axis: int, base: TensorInfo) -> None:
        if len(info.shape) == len(base.shape) and info.shape[axis] != base.shape[0]:
            num_tokens = info.shape[axis]
            raise UnsupportedModelError(
                f"{self._where}: {printable(info.name)} has {num_tokens} tokens, the base model {base.shape[0]}; an "
                "adapter with another vocabulary is not supported: in transformers, call "
                f"resize_token_embeddings({num_tokens}) on the base model, load the adapter with peft, call "
                "merge_and_unload, and save that with the adapter's tokenizer"
            )

    def _update(self, module: str, target: Target, factors: dict[tuple[str, str], TensorInfo]) -> LowRankUpdate:
        is_embedding = module == _EMBEDDING_MODULE
        suffix = "lora_embedding_{}" if is_embedding else "lora_{}.weight"
        for factor in "AB":
            if (module, factor) not in factors:
                name = f"{_PREFIX}{module}.{suffix.format(factor)}"
                raise CheckpointError(f"{self._where} lacks {name}; is it the adapter of another model, or damaged?")
        a, b = factors[module, "A"], factors[module, "B"]
        rows, columns = self._base[module + WEIGHT_SUFFIX].shape
        if is_embedding:
            rows, columns = columns, rows
        if module in _ENDS:
            with_tokens, axis = (a, 1) if is_embedding else (b, 0)
            self._check_vocabulary(with_tokens, axis, self._base[module + WEIGHT_SUFFIX])
        config = f"rank {target.rank} in its config, {module} in the base model"
        self._check_shape(a, (target.rank, columns), config)
        self._check_shape(b, (rows, target.rank), config)
        scale = self._adapter.weight * target.scale
        return LowRankUpdate(a, b, scale, True) if is_embedding else LowRankUpdate(b, a, scale)

    def _check_shape(self, info: TensorInfo, shape: tuple[int, ...], reason: str) -> None:
        if info.shape != shape:
            raise self._error(info, f"is {list(info.shape)}, expected {list(shape)} ({reason})")

    def _error(self, info: TensorInfo, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {printable(info.name)} {what}")


def _with_own_head(tensors: ModelTensors, adapter: Adapter) -> ModelTensors:
    """Give a tied model a head of its own if the adapter's embedding and head may differ.

    peft trains copies of what modules_to_save names, unless ensure_weight_tying keeps the two one.
    """
    saves = is_saved(adapter.config, _EMBEDDING_MODULE) or is_saved(adapter.config, _HEAD_MODULE)
    if tensors.head != EMBEDDING or not saves or adapter.config.ties_weights:
        return tensors
    head = replace(tensors.tensors[EMBEDDING], name=HEAD)
    return replace(tensors, tensors={**tensors.tensors, HEAD: head}, head=HEAD)
