"""A GGUF file as a Hugging Face model: its config, its tensors by their names there, and the plan that writes them.

Q8_0 and Q4_0 become groups of 32 weights, code for code. Other blocks of codes are dequantized by the `gguf` library,
and written as int8 groups of 32, or as 16 bits: Q4_1 too, whose smallest value is no whole number of steps from zero.
llama.cpp interleaves the two halves of the query and key heads of some families; here they lie as in Hugging Face.
Source: llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/tensor_mapping.py.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from llmcli.checkpoint.export_plan import (
    ExportPlan,
    PlannedWeight,
    fill_shards,
    quantization_config_of,
    vllm_concerns_of,
)
from llmcli.checkpoint.folder import GENERATION_CONFIG_NAME, Checkpoint, FileState, SourceState
from llmcli.checkpoint.formats import Array, LayerSource, PackedLayer, StoredLayer
from llmcli.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from llmcli.checkpoint.gguf_tokenizer import tokenizer_files
from llmcli.checkpoint.layout import HEAD, WEIGHT_SUFFIX, ExpectedTensor
from llmcli.checkpoint.model import Model, match_tensors
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo, printable
from llmcli.config.llama import LlamaConfig, RopeParameters
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization import rounding
from llmcli.quantization.schemes import DEFAULT_SHARD_BYTES, WeightScheme

FORM = 1  # of what `plan_gguf` makes; a folder of another one is not used again
_GROUP_SIZE = 32  # of GGUF's blocks
_INT8 = WeightScheme(8, _GROUP_SIZE)
_PLAIN = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_CODES = {GGMLQuantizationType.Q8_0: _INT8, GGMLQuantizationType.Q4_0: WeightScheme(4, _GROUP_SIZE)}
_DEQUANTIZED = tuple(
    GGMLQuantizationType[name] for name in ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
_SCALE_DTYPE = "F16"


@dataclass(frozen=True)
class _Family:
    """A `general.architecture`: the model_type that it is, and whether its query and key heads are interleaved."""

    model_type: str
    architecture: str
    is_interleaved: bool


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", False),
    "smollm3": _Family("smollm3", "SmolLM3ForCausalLM", True),
}

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3: the file has the factors that follow from these, not the parameters.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FACTOR_TOLERANCE = 1e-4


@dataclass(frozen=True)
class BlockTensor(TensorInfo):
    """A tensor with the name and shape that Hugging Face gives it, computed from blocks as it is read.

    `num_heads`: of a matrix whose heads are interleaved in the file, else 0.
    """

    blocks: GgufTensor
    num_heads: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of its blocks."""
        return self.blocks.num_bytes


class GgufReader(TensorReader):
    """Reads tensors, and computes those of blocks."""

    def _read_range(self, info: TensorInfo, begin: int, view: memoryview) -> None:
        if not isinstance(info, BlockTensor):
            super()._read_range(info, begin, view)
            return
        if not len(view):
            return
        row_bytes = info.num_bytes // info.shape[0]
        end = begin + len(view)
        first, last = begin // row_bytes, -(-end // row_bytes)
        values = dequantize(self.read_blocks(info, first, last), info.blocks.kind)
        with np.errstate(over="ignore"):
            stored = rounding.round_nearest(values.astype(np.float32, copy=False), info.dtype)
        if not np.isfinite(rounding.widen(stored, info.dtype)).all():
            raise CheckpointError(
                f"{info.blocks.name} in {info.path} holds NaN, infinity or a value too large for {info.dtype}; the "
                "file is damaged, download it again"
            )
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        view[:] = data[begin - first * row_bytes : end - first * row_bytes].data

    def read_blocks(self, info: BlockTensor, first: int, last: int) -> Array:
        """Rows of blocks in Hugging Face's order. Shapes: result uint8 [last - first, bytes of a row]"""
        tensor, num_rows = info.blocks, info.shape[0]
        row_bytes = tensor.num_bytes // num_rows
        rows = np.arange(first, last)
        if info.num_heads:
            rows = _interleaved_row(rows, num_rows // info.num_heads)
        low, high = int(rows.min()), int(rows.max()) + 1
        data = np.empty((high - low, row_bytes), np.uint8)
        raw = TensorInfo(tensor.name, "U8", data.shape, tensor.path, tensor.offset, tensor.num_bytes)
        super()._read_range(raw, low * row_bytes, data.data.cast("B"))
        rows_in_order: Array = data[rows - low]
        return rows_in_order


def _interleaved_row(row: Array, head_dim: int) -> Array:
    """Where the file has a row of Hugging Face's matrix: pair i of a head has its rows at 2i and 2i + 1 there."""
    head, within = row // head_dim, row % head_dim
    half, pair = within // (head_dim // 2), within % (head_dim // 2)
    place: Array = head * head_dim + 2 * pair + half
    return place


@dataclass(frozen=True)
class _Blocks:
    """A layer stored as Q8_0 or Q4_0: blocks of a scale in fp16 and 32 codes."""

    kind: GGMLQuantizationType

    @property
    def name(self) -> str:
        return f"GGUF {self.kind.name}"

    def tensors(self, weight: ExpectedTensor, scheme: WeightScheme) -> Iterator[ExpectedTensor]:
        """The one tensor."""
        yield weight

    def read(self, source: LayerSource) -> StoredLayer:
        """Read a layer, code for code."""
        info, reader = source.info("weight"), source.reader
        assert isinstance(info, BlockTensor)
        assert isinstance(reader, GgufReader)
        num_rows, num_inputs = source.layer.shape
        data = reader.read_blocks(info, 0, num_rows)
        blocks = data.reshape(num_rows, num_inputs // _GROUP_SIZE, -1)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{info.blocks.name} in {info.path} has a scale that is NaN or infinite; download it again"
            )
        codes = blocks[:, :, 2:]
        if self.kind == GGMLQuantizationType.Q8_0:
            codes = codes ^ 0x80  # from signed numbers
        else:  # the first 16 in the low halves of bytes
            codes = np.concatenate((codes & 15, codes >> 4), axis=2)
        packed = rounding.pack_rows(codes.reshape(num_rows, num_inputs), source.layer.scheme.num_bits)
        return StoredLayer(packed, np.ascontiguousarray(scales), _SCALE_DTYPE, None)

    def read_order(self, source: LayerSource) -> None:
        """None: inputs keep their order."""


@dataclass(frozen=True)
class GgufState(SourceState):
    """`folder` has the small files of the model; `weight_states` are those of the GGUF files."""

    weight_states: Mapping[str, FileState]

    @property
    def weight_files(self) -> dict[str, FileState]:
        """The GGUF files."""
        return dict(self.weight_states)

    def check(self) -> None:
        """Refuse files that have changed. Raises: CheckpointError"""
        for name, state in self.weight_states.items():
            if _state_of(Path(name)) != state:
                raise CheckpointError(f"{name} has changed while it was being read; run the same command again")


def _state_of(path: Path) -> FileState | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return FileState(info.st_size, info.st_mtime_ns, info.st_ino)


def plan_gguf(
    path: Path, folder: Path, shard_bytes: int = DEFAULT_SHARD_BYTES, *, has_codes: bool = True
) -> ExportPlan:
    """Plan the model folder of a GGUF file; without codes all weights are written as floats of 16 bits.

    The tokenizer's files go into `folder`, an empty one, from which the export copies them.
    Raises: CheckpointError for a damaged file; UnsupportedModelError naming what is not supported
    """
    file = read_gguf(path)
    _write_small_files(file, folder)
    states = {str(one): state for one in file.paths if (state := _state_of(one))}
    family = _family_of(file)
    config_json = _config_json(file, family)
    config = LlamaConfig.from_dict(config_json, str(path))
    infos = dict(_infos(file, family, config))
    model = Model(Checkpoint(path, config_json, {}, infos), config, match_tensors(config, infos, str(path), None))
    weights = [_planned(name, info, has_codes=has_codes) for name, info in model.tensors.tensors.items()]
    kept = tuple(weight.module for weight in weights if weight.scheme is None and weight.name.endswith("_proj.weight"))
    schemes = [weight.scheme for weight in weights if weight.scheme is not None and weight.name != HEAD]
    if schemes:
        chosen = max(sorted(set(schemes), key=str), key=schemes.count)
        config_json = {**config_json, "quantization_config": quantization_config_of(weights, chosen, kept).to_dict()}
    return ExportPlan(
        model=model,
        source=GgufState(folder, {}, states),
        options=None,
        shards=fill_shards(weights, shard_bytes),
        config_json=config_json,
        channel_layers=(),
        skipped=kept if schemes else (),
        concerns=vllm_concerns_of(weights) if schemes else (),
    )


def _family_of(file: GgufFile) -> _Family:
    name = file.metadata.get("general.architecture")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{file.path}: architecture {printable(name)} is not supported, expected one of {', '.join(_FAMILIES)}"
        )
    if file.metadata.get(f"{name}.expert_count"):
        raise UnsupportedModelError(f"{file.path} has experts (MoE), which are not supported; use a dense model")
    return family


def _config_json(file: GgufFile, family: _Family) -> dict[str, Any]:
    metadata, tensors = file.metadata, file.tensors
    prefix = metadata["general.architecture"]

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{key}", default)
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{file.path}: {prefix}.{key} is {printable(value)}, expected a number")
        return value

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no token_embd.weight; download it again")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"{file.path}: {prefix}.{key} {number(key)} is not the head's size {head_dim}")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16" if GGMLQuantizationType.BF16 in {one.kind for one in tensors.values()} else "float16",
    }
    for name in ("bos", "eos"):
        if isinstance(value := metadata.get(f"tokenizer.ggml.{name}_token_id"), int):
            config[f"{name}_token_id"] = value
    if scaling := _rope_scaling(file, prefix, number, config):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GgufFile, prefix: str, number: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if factors := file.tensors.get(_ROPE_FACTORS):
        return _llama3_scaling(file, factors, config)
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: {prefix}.rope.scaling.type {printable(kind)} is not supported")
    scaling = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "yarn":
        original = number("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GgufFile, tensor: GgufTensor, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's parameters, whose factors must be those of the file."""
    head_dim = config["head_dim"]
    if tensor.kind != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} is not of {head_dim // 2} float32")
    factors = np.empty(tensor.shape, np.float32)
    info = TensorInfo(tensor.name, "F32", tensor.shape, tensor.path, tensor.offset, tensor.num_bytes)
    with TensorReader() as reader:
        reader.read_tensor_into(info, factors.data)
    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    theta = config["rope_theta"]
    plain = RopeParameters("default", theta).inverse_frequencies(head_dim)
    stretched = RopeParameters(rope_theta=theta, **scaling).inverse_frequencies(head_dim)
    if not np.allclose(plain / factors, stretched, rtol=_FACTOR_TOLERANCE, atol=0):
        raise UnsupportedModelError(f"{file.path}: {_ROPE_FACTORS} has other factors than those of Llama 3.1 to 3.3")
    return scaling


def _infos(file: GgufFile, family: _Family, config: LlamaConfig) -> Iterator[tuple[str, TensorInfo]]:
    """Each tensor under Hugging Face's name; those that have none keep their own."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FACTORS:
            continue
        name, num_heads = tensor.name, 0
        if match := _OF_LAYER.fullmatch(name):
            if match[2] in _LAYER_NAMES:
                name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
            num_heads = heads.get(match[2], 0) if family.is_interleaved else 0
        elif name.removesuffix(WEIGHT_SUFFIX) in _NAMES:
            name = _NAMES[name.removesuffix(WEIGHT_SUFFIX)] + WEIGHT_SUFFIX
        yield name, _info(file, tensor, name, num_heads)


def _info(file: GgufFile, tensor: GgufTensor, name: str, num_heads: int) -> TensorInfo:
    plain = _PLAIN.get(tensor.kind)
    if plain is None and tensor.kind not in (*_CODES, *_DEQUANTIZED):
        known = ", ".join(kind.name for kind in (*_PLAIN, *_CODES, *_DEQUANTIZED))
        raise UnsupportedModelError(
            f"{tensor.name} in {tensor.path} has the type {tensor.kind.name}, expected one of {known}; use another "
            "file of the model"
        )
    size = rounding.STORED_AS[plain or "F16"]
    if plain and not num_heads:
        return TensorInfo(name, plain, tensor.shape, tensor.path, tensor.offset, tensor.num_bytes)
    num_bytes = int(np.prod(tensor.shape)) * np.dtype(size).itemsize
    return BlockTensor(name, plain or "F16", tensor.shape, tensor.path, tensor.offset, num_bytes, tensor, num_heads)


def _planned(name: str, info: TensorInfo, *, has_codes: bool) -> PlannedWeight:
    is_linear = name == HEAD or name.endswith("_proj.weight")
    if not isinstance(info, BlockTensor) or info.blocks.kind in _PLAIN or not is_linear or not has_codes:
        return PlannedWeight(name, info, None, info.dtype)
    scheme = _CODES.get(info.blocks.kind)
    if scheme is None:  # float32, so that it is rounded once
        floats = BlockTensor(
            name, "F32", info.shape, info.path, info.offset, 2 * info.num_bytes, info.blocks, info.num_heads
        )
        return PlannedWeight(name, floats, _INT8, _SCALE_DTYPE)
    output_size, input_size = info.shape
    layer = PackedLayer(scheme, (output_size, input_size), _Blocks(info.blocks.kind))
    return PlannedWeight(name, info, scheme, _SCALE_DTYPE, layer, (info,))


def _write_small_files(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer, and what ends a text."""
    files = tokenizer_files(file.metadata, str(file.path))
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    if ends := sorted({number for number in ids if isinstance(number, int)}):
        files[GENERATION_CONFIG_NAME] = json.dumps({"eos_token_id": ends}).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
