"""What config.json says of quantized weights, by the method that it names: compressed-tensors, AWQ, GPTQ or fp8.

Reads bits, groups and zero points. Which layers are quantized is said by compressed-tensors alone: elsewhere the
tensors tell.
Refuses other methods, and other forms of these, by name.
Source: transformers' quantization_config.py; autoawq 0.2.9; gptqmodel 7.7.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import METHOD, QuantizationConfig, read_block
from llmcli.quantization.schemes import Fp8Scheme, WeightScheme

AWQ, GPTQ, FP8 = "awq", "gptq", "fp8"
# Others that store 8-bit floats as fp8 does: Meta's, with a scale a row, and NVIDIA's, with one.
_FBGEMM, _MODELOPT = "fbgemm_fp8", "modelopt"

_GPTQ_BITS = (4, 8)
# What GPTQ files of each version keep of a zero point: the first had it minus 1.
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Parts of a gptqmodel model that change its products.
_GPTQ_EXTRAS = ("adapter", "rotation")


@dataclass(frozen=True)
class AwqConfig:
    """Weights of 4 bits with zero points, in the layout that AWQ calls gemm."""

    scheme: WeightScheme


@dataclass(frozen=True)
class GptqConfig:
    """Weights of 4 or 8 bits. Files hold zero points minus `zero_offset`.

    `orders_inputs` is what `desc_act` says: inputs were sorted before they were grouped, or not; None if it is missing.
    """

    scheme: WeightScheme
    zero_offset: int
    orders_inputs: bool | None


@dataclass(frozen=True)
class Fp8Config:
    """8-bit floats with scales. `scheme` is None without blocks: then the shape of the scales tells it."""

    scheme: Fp8Scheme | None


Quantization = QuantizationConfig | AwqConfig | GptqConfig | Fp8Config


def read_quantization(declared: object, where: str) -> Quantization:
    """Read the value of `quantization_config`; `where` names the file in messages.

    Raises: UnsupportedModelError naming the method or the feature that is not supported; CheckpointError for values
    that the method does not allow.
    """
    fields = declared if isinstance(declared, dict) else {}
    method = method_of(fields)
    if method == METHOD:
        return QuantizationConfig.from_dict(declared, where)
    inside = f"{where}: quantization_config of {method}"
    if method == AWQ:
        return _read_awq(fields, inside)
    if method == GPTQ:
        return _read_gptq(fields, inside)
    if method in (FP8, _FBGEMM):
        return _read_fp8(fields, inside)
    if method == _MODELOPT:
        if fields.get("quant_algo") != "FP8":
            _refuse(inside, f"quant_algo {_shown(fields.get('quant_algo'))}", "FP8")
        return Fp8Config(None)
    refuse_method(method, where)


def notes_of(quantization: Quantization | None) -> tuple[str, ...]:
    """What users should know of a quantized model, a sentence each."""
    notes = []
    listed = quantization if isinstance(quantization, QuantizationConfig) else None
    has_activations = listed is not None and any(group.has_activations for group in listed.groups)
    if has_activations or isinstance(quantization, Fp8Config):
        notes.append(
            "made for 8-bit activations; llmcli uses its 8-bit weights and does not round activations to 8 bits"
        )
    if listed is not None and listed.has_cache:
        notes.append("made for a quantized KV cache; llmcli does not use its scales (--kv-cache int8 needs none)")
    return tuple(notes)


def method_of(fields: Mapping[str, Any]) -> object:
    """The method that a `quantization_config` names; bitsandbytes did not always write it, and MLX does not."""
    if method := fields.get("quant_method"):
        return method
    if not fields.keys().isdisjoint({"load_in_8bit", "load_in_4bit"}):
        return "bitsandbytes"
    return "mlx" if fields.keys() >= {"bits", "group_size"} else "unknown"


def refuse_method(method: object, where: str) -> NoReturn:
    """Refuse weights by the name of their method. Raises: UnsupportedModelError"""
    raise UnsupportedModelError(
        f"{where} says that the weights are quantized (method {reprlib.repr(method).strip(chr(39))}), which is not "
        f"supported; use the original model in bf16, fp16 or fp32, which `llmcli quantize` makes as small, or one "
        f"quantized by {METHOD}, {AWQ}, {GPTQ} or {FP8}"
    )


def _read_awq(fields: Mapping[str, Any], where: str) -> AwqConfig:
    version = _word(fields, ("version", "format", "checkpoint_format"), "gemm", where)
    if version != "gemm" or fields.get("backend") == "llm-awq":
        _refuse(where, f"AWQ version {fields.get('backend') if version == 'gemm' else version}", "gemm")
    bits = _number(fields, ("bits", "w_bit"), where)
    if bits != 4:
        _refuse(where, f"AWQ with bits {bits}", "4")
    if not _flag(fields, "zero_point", where):
        _refuse(where, "AWQ with zero_point false", "true")
    return AwqConfig(WeightScheme(4, _group_size(fields, ("group_size", "q_group_size"), where), is_symmetric=False))


def _read_gptq(fields: Mapping[str, Any], where: str) -> GptqConfig:
    version = _word(fields, ("checkpoint_format", "format"), "gptq", where)
    if version not in _GPTQ_OFFSETS or fields.get("is_marlin_format"):
        _refuse(where, f"GPTQ format {'marlin' if fields.get('is_marlin_format') else version}", "gptq or gptq_v2")
    if fields.get("pack_dtype") not in (None, "int32"):
        _refuse(where, f"GPTQ with pack_dtype {_shown(fields['pack_dtype'])}", "int32")
    bits = _number(fields, ("bits",), where)
    if bits not in _GPTQ_BITS:
        _refuse(where, f"GPTQ with bits {bits}", "4 or 8")
    for key in _GPTQ_EXTRAS:
        if fields.get(key):
            _refuse(where, f"GPTQ with {key}")
    dynamic = fields.get("dynamic") or {}
    # "-:" leaves layers as they are, which their tensors say too; other entries give layers bits of their own.
    if not isinstance(dynamic, dict) or any(not name.startswith("-:") for name in dynamic):
        _refuse(where, "GPTQ with bits that differ between layers (dynamic)")
    is_symmetric = _flag(fields, "sym", where)
    scheme = WeightScheme(bits, _group_size(fields, ("group_size",), where), is_symmetric)
    orders_inputs = None if fields.get("desc_act") is None else _flag(fields, "desc_act", where)
    return GptqConfig(scheme, _GPTQ_OFFSETS[version], orders_inputs)


def _read_fp8(fields: Mapping[str, Any], where: str) -> Fp8Config:
    for key, expected in (("fmt", "e4m3"), ("scale_fmt", "float")):
        if fields.get(key) not in (None, expected):
            _refuse(where, f"fp8 with {key} {_shown(fields[key])}", expected)
    block = fields.get("weight_block_size")
    return Fp8Config(None if block is None else Fp8Scheme(*read_block(block, "weight_block_size", where)))


def _value(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    """What the fields of these names say, None if all are missing; they may not contradict one another."""
    values = {name: fields[name] for name in names if fields.get(name) is not None}
    first = next(iter(values.values()), None)
    if any(value != first or type(value) is not type(first) for value in values.values()):
        said = " and ".join(f"{name} {_shown(value)}" for name, value in values.items())
        raise CheckpointError(f"{where}: {said} contradict each other; correct the one that is wrong")
    return first


def _word(fields: Mapping[str, Any], names: tuple[str, ...], default: str, where: str) -> str:
    values = {name: value.lower() if isinstance(value := fields.get(name), str) else value for name in names}
    value = _value(values, names, where)
    if not isinstance(value, str | None):
        raise CheckpointError(f"{where}: {names[0]} is {_shown(value)}, expected a name")
    return value or default


def _number(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    value = _value(fields, names, where)
    if type(value) is not int:
        raise CheckpointError(f"{where}: {names[0]} is {_shown(value)}, expected a number")
    return value


def _flag(fields: Mapping[str, Any], name: str, where: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} is {_shown(value)}, expected true or false")
    return value


def _group_size(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> int | None:
    """The group size, None for one scale a row, which is written as -1."""
    size = _number(fields, names, where)
    if size == -1:
        return None
    if size < 1:
        raise CheckpointError(f"{where}: {names[0]} is {size}, expected a number from 1 up, or -1 for whole rows")
    return size


def _refuse(where: str, what: str, expected: str | None = None) -> NoReturn:
    hint = f", expected {expected}" if expected else ""
    raise UnsupportedModelError(
        f"{where}: {what} is not supported{hint}; use the same model as AWQ gemm, as GPTQ of 4 or 8 bits, as fp8 "
        "(e4m3), or in 16 bits"
    )


def _shown(value: object) -> str:
    return reprlib.repr(value)
