"""`StoredModel`: what a model's memory depends on, with or without its files, and the types it is held in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llmcli.checkpoint.formats import SCALE_SUFFIXES, PackQuantized
from llmcli.checkpoint.layout import EMBEDDING, HEAD, WEIGHT_DTYPES, expected_tensors
from llmcli.checkpoint.translation import Translation
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.tiles import BLOCK_SCALE, HALF_ROWS
from llmcli.quantization.schemes import Fp8Scheme, WeightScheme
from llmcli.runners.cuda.plan.regions import STORED_DTYPES

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model


CODES = "int8"  # the KV cache's only type that is not a float type


@dataclass(frozen=True)
class MatrixFormat:
    """How the weights of a matrix are held: in a float type, or in `scheme` with scales of `scale_type`.

    `order` are the bytes of int32 [num_inputs]: the input of each column; None if they are in order.
    """

    weight_type: str
    scheme: WeightScheme | Fp8Scheme | None = None
    scale_type: str | None = None
    order: bytes | None = None


@dataclass(frozen=True)
class StoredModel:
    """A model's shape and the types of its tensors. `dtype` is the requested type; `auto` keeps float types as stored.

    `kv_cache` is the requested type: `auto` or `int8`. `orders` has the `MatrixFormat.order` of modules by name. `head`
    names the output head's weight, `packed` has the quantized layers by module name, `dtypes` the type of each float
    tensor by name. A tensor not in `dtypes` does not exist: this shows which layers have a bias or a norm.
    """

    config: LlamaConfig
    head: str
    packed: Mapping[str, WeightScheme | Fp8Scheme]
    dtypes: Mapping[str, str]
    dtype: str = "auto"
    kv_cache: str = "auto"
    orders: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: Model, dtype: str = "auto", kv_cache: str = "auto") -> StoredModel:
        """A model whose files exist. Raises: as `of_translation`"""
        return cls.of_translation(Translation(model), dtype, kv_cache)

    @classmethod
    def of_translation(cls, translation: Translation, dtype: str = "auto", kv_cache: str = "auto") -> StoredModel:
        """A model whose tensors are read in our form.

        Raises: CheckpointError for an order of inputs that cannot be read, or contradicts other tensors
        """
        model, orders = translation.model, translation.original.input_orders
        infos = model.tensors.tensors
        return cls(
            model.config,
            model.tensors.head,
            {name: layer.scheme for name, layer in model.tensors.quantized.items()},
            {name: STORED_DTYPES[info.dtype] for name, info in infos.items() if info.dtype in STORED_DTYPES},
            dtype,
            kv_cache,
            {module: order.astype(np.int32).tobytes() for module, order in orders.items()},
        )

    @classmethod
    def of_config(
        cls,
        config: LlamaConfig,
        *,
        stored_dtype: str,
        scheme: WeightScheme | None = None,
        dtype: str = "auto",
        kv_cache: str = "auto",
    ) -> StoredModel:
        """A model as `llmcli quantize` writes it: every linear layer but the head in `scheme`, if there is one."""
        packed: dict[str, WeightScheme | Fp8Scheme] = {}
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        floats = [head]
        for tensor in expected_tensors(config):
            if tensor.is_linear and scheme is not None:
                own = scheme if scheme.divides(tensor.shape[1]) else WeightScheme(scheme.num_bits, None)
                packed[tensor.layer] = own
                parts = PackQuantized().tensors(tensor, own)
                floats += [part.name for part in parts if part.dtypes == WEIGHT_DTYPES]
            else:
                floats.append(tensor.name)
        return cls(config, head, packed, dict.fromkeys(floats, stored_dtype), dtype, kv_cache)

    @property
    def embedding_type(self) -> str:
        """The type of the embedding."""
        return self._held_type(EMBEDDING)

    @property
    def cache_type(self) -> str:
        """The type of the KV cache: of 16 bits float16, whose 11 bits of precision keep logits closer than 8 would.

        Its range is wide enough: keys and values stay far below 65504, where they would be cut off.
        """
        if self.kv_cache != "auto":
            return self.kv_cache
        return "float32" if self.embedding_type == "float32" else "float16"

    @property
    def attention_type(self) -> str:
        """The type in which attention multiplies; int8 codes are exact in float16."""
        return "float32" if self.cache_type == "float32" else "float16"

    def format_of(self, module: str) -> MatrixFormat:
        """How the weights of one linear layer are held."""
        scheme = self.packed.get(module)
        if isinstance(scheme, Fp8Scheme):
            return MatrixFormat("fp8", scheme, self._fp8_scale_type(scheme, module))
        if scheme is not None:
            order = self.orders.get(module)
            # Scales keep their type: their rounding is part of the quantization.
            return MatrixFormat(f"int{scheme.num_bits}", scheme, self.dtypes[f"{module}.weight_scale"], order)
        return MatrixFormat(self._held_type(f"{module}.weight"))

    def _fp8_scale_type(self, scheme: Fp8Scheme, module: str) -> str:
        """The type of the scales: BLOCK_SCALE if they are float32 and blocks have whole half tiles, else as stored."""
        stored = self.dtypes[f"{module}.{self.scale_of(module)}"]
        is_shared = scheme.block_inputs is not None and (scheme.block_rows or HALF_ROWS) % HALF_ROWS == 0
        return BLOCK_SCALE if is_shared and stored == "float32" else stored

    def scale_of(self, module: str) -> str:
        """The name of the scales of a quantized layer."""
        return next(suffix for suffix in SCALE_SUFFIXES if f"{module}.{suffix}" in self.dtypes)

    @property
    def precision(self) -> str:
        """The precision of the weights for the user: `int8 group 128`, or the type of plain ones."""
        return precision_of(self.packed.values(), self.embedding_type)

    def _held_type(self, name: str) -> str:
        return self.dtypes[name] if self.dtype == "auto" else self.dtype


def precision_of(schemes: Iterable[WeightScheme | Fp8Scheme], plain_type: str) -> str:
    """The precision of weights for the user, from the schemes of the quantized ones and the type of plain ones."""
    names = sorted({_scheme_name(scheme) for scheme in schemes})
    return " and ".join(names) if names else plain_type


def _scheme_name(scheme: WeightScheme | Fp8Scheme) -> str:
    if isinstance(scheme, Fp8Scheme):
        return "fp8"
    granularity = "channel" if scheme.group_size is None else f"group {scheme.group_size}"
    return f"int{scheme.num_bits} {granularity}{'' if scheme.is_symmetric else ' asymmetric'}"
