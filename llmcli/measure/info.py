"""The contents and needs of a model folder: shape, tensors, bytes, special tokens, sampling defaults."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from llmcli.checkpoint.export_workspace import read_card
from llmcli.checkpoint.formats import PackedLayer, PackQuantized
from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Layer, Model
from llmcli.sampling.params import ResolvedSampling
from llmcli.tokenizer.base import Tokenizer

# Bytes of an element in the precisions of a run.
PRECISIONS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class MemoryNeed:
    """Memory at one precision, without the working memory of a run. Units: bytes"""

    weights_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model.

    `quantization` counts the layers of each scheme and format; `quality_card` is what this program noted on writing.
    Units: bytes. `decode_bytes_per_token` are the weight bytes, as stored, that one decoded token must read at batch 1:
           every matrix once and one row of the embedding; each token of context adds `kv_bytes_per_token` in 16 bits.
    """

    folder: str
    model_type: str
    shape: dict[str, Any]
    quantization: dict[str, int]
    quality_card: dict[str, Any] | None
    num_parameters: int
    num_tensors: int
    num_shards: int
    bytes_by_dtype: dict[str, int]
    decode_bytes_per_token: int
    kv_bytes_per_token: int
    context: int
    memory: dict[str, MemoryNeed]
    vocab_size: int
    bos: str | None
    eos: dict[int, str]
    num_special_tokens: int
    chat_template: str | None
    sampling: dict[str, tuple[float | str, str]]


def inspect_model(
    model: Model,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    sampling: ResolvedSampling,
    chat_template: str | None,
    context: int,
) -> ModelInfo:
    """Collect the facts; reads no weights. `chat_template` says where the template was found, if there is one."""
    config = model.config
    infos, layers = model.tensors.tensors, model.tensors.quantized
    bytes_by_dtype: Counter[str] = Counter()
    num_parameters = 0
    plain_bytes = 0  # of tensors in the precision of the run, 8-bit floats included; codes stay as they are
    for name, info in infos.items():
        bytes_by_dtype[info.dtype] += info.num_bytes
        module = name.rpartition(".")[0]
        if module not in layers or name.endswith(".bias"):
            num_parameters += math.prod(info.shape)
            plain_bytes += info.num_bytes
        elif module in model.tensors.scaled:
            plain_bytes += info.num_bytes
    num_plain = num_parameters + sum(math.prod(layer.shape) for layer in model.tensors.scaled.values())
    num_parameters += sum(math.prod(layer.shape) for layer in layers.values())
    embedding = infos[EMBEDDING]
    weights_bytes = sum(bytes_by_dtype.values())
    is_tied = model.tensors.head == EMBEDDING
    embedding_row_bytes = embedding.num_bytes // config.vocab_size
    decode_bytes = weights_bytes + embedding_row_bytes - (0 if is_tied else embedding.num_bytes)
    windows = sorted({window for window in config.traits.sliding_windows if window is not None})
    return ModelInfo(
        folder=str(model.checkpoint.folder),
        model_type=config.model_type,
        shape={
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_type": config.rope.rope_type,
            "rope_theta": config.rope.rope_theta,
            "tied_head": is_tied,
            "sliding_window": windows[0] if windows else None,
            "num_sliding_layers": sum(window is not None for window in config.traits.sliding_windows),
            "num_layers_without_rope": config.traits.uses_rope.count(False),
        },
        quantization=dict(Counter(map(_scheme_name, layers.values()))),
        quality_card=dict(card) if (card := read_card(model.checkpoint.folder)) is not None else None,
        num_parameters=num_parameters,
        num_tensors=len(infos),
        num_shards=len({info.path for info in infos.values()}),
        bytes_by_dtype=dict(bytes_by_dtype),
        decode_bytes_per_token=decode_bytes,
        kv_bytes_per_token=config.kv_cache_bytes(1, 2),
        context=context,
        memory={
            name: MemoryNeed(
                weights_bytes - plain_bytes + num_plain * itemsize, config.kv_cache_bytes(context, itemsize)
            )
            for name, itemsize in PRECISIONS.items()
        },
        vocab_size=tokenizer.vocab_size,
        bos=None if tokenizer.bos_token_id is None else tokenizer.piece(tokenizer.bos_token_id),
        eos={token_id: tokenizer.piece(token_id) for token_id in sorted(eos_token_ids)},
        num_special_tokens=len(tokenizer.special_token_ids),
        chat_template=chat_template,
        sampling={name: (value, source) for name, value, source in sampling.rows()},
    )


def _scheme_name(layer: Layer) -> str:
    """The scheme, and the format if it is not the one that `llmcli quantize` writes."""
    if isinstance(layer, PackedLayer) and layer.format != PackQuantized():
        return f"{layer.scheme}, stored as {layer.format.name}"
    return str(layer.scheme)
