"""The quantization in config.json: read by method, queried, and written as compressed-tensors writes it."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.patterns import match_names
from llmcli.quantization.schemes import Fp8Scheme, WeightScheme

# The `quantization_config` of config.json as compressed-tensors writes it: read, queried, written.
#
# Reads int4 and int8 weights, packed or one byte each, and 8-bit floats. Activation quantization is allowed only with
# weights that mean the same without it. A quantized cache is allowed; every other feature is refused by name.
# Writes `pack-quantized`. Source: compressed_tensors.quantization (quant_config, quant_scheme, quant_args) and its
# utils.match.

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
INT_FORMAT = "int-quantized"
FLOAT_FORMAT = "float-quantized"
# Older versions wrote this for both types; the weights' own type shows which it is.
NAIVE_FORMAT = "naive-quantized"
REGEX_PREFIX = "re:"
# In torch every module is also a Module, so a target of this name means everything.
_BASE_CLASS = "Module"

_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# Observers only matter while scales are being chosen; zero points are int8 in this format, whatever zp_dtype says.
_IGNORED_WEIGHTS_KEYS = {"observer", "observer_kwargs", "zp_dtype"}
_WEIGHTS_KEYS = _IGNORED_WEIGHTS_KEYS | {
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "dynamic",
    "actorder",
    "scale_dtype",
}
# Orders that matter only while scales are chosen, and orders that store a group index (weight_g_idx).
_PLAIN_ORDERS = (None, False, "weight", "static")
_GROUP_ORDERS = (True, "group", "dynamic")
# llm-compressor stored codes under both names; if frozen weights are still floats, their tensors show it.
_STATUSES = ("compressed", "frozen")
_BLOCK = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")
_SCALE_DTYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True)
class ConfigGroup:
    """Modules that share a scheme; targets are module names, `re:` patterns of names, or class names like Linear.

    `has_group_index`: each layer stores the group of each input, as a group's inputs are not neighbours.
    `has_activations`: activations are quantized, too, which llmcli does not do.
    """

    targets: tuple[str, ...]
    scheme: WeightScheme | Fp8Scheme
    format: str = FORMAT
    has_group_index: bool = False
    has_activations: bool = False


@dataclass(frozen=True)
class QuantizationConfig:
    """How each module is quantized. Modules that `ignore` matches are not, whatever the groups say.

    `has_cache`: the KV cache is quantized, too, with the model's scales, which llmcli does not use.
    """

    groups: tuple[ConfigGroup, ...]
    ignore: tuple[str, ...]
    has_cache: bool = False

    def groups_of(
        self, names: Sequence[str], where: str, module_class: str = "Linear"
    ) -> dict[str, ConfigGroup | None]:
        """The groups of modules by their names (without .weight), None for modules that are not quantized.

        An exact name wins, then the first pattern in alphabetical order, then a class name; if a target is in two
        groups, the later group wins.
        Raises: CheckpointError, naming `where`, for a pattern that is not a regular expression or does not end.
        """
        classes = sorted({module_class, _BASE_CLASS})
        groups = {target: group for group in self.groups for target in group.targets}
        ignored = set(self.ignore)
        patterns = {
            entry: entry.removeprefix(REGEX_PREFIX)
            for entry in sorted(ignored | groups.keys())
            if entry.startswith(REGEX_PREFIX)
        }
        matched = match_names(list(patterns.values()), names, f"{where}: the pattern", CheckpointError)

        def is_ignored(name: str) -> bool:
            if name in ignored or not ignored.isdisjoint(classes):
                return True
            return any(entry in ignored and name in matched[pattern] for entry, pattern in patterns.items())

        def group_of(name: str) -> ConfigGroup | None:
            by_pattern = (entry for entry, pattern in patterns.items() if entry in groups and name in matched[pattern])
            return next((groups[target] for target in (name, *by_pattern, *classes) if target in groups), None)

        return {name: None if is_ignored(name) else group_of(name) for name in names}

    @classmethod
    def from_dict(cls, config: object, where: str) -> "QuantizationConfig":
        """Read the value of `quantization_config`; `where` names the file in messages.

        Raises: UnsupportedModelError naming an unsupported feature; CheckpointError for values that the
        format does not allow.
        """
        fields = _object(config, "quantization_config", where)
        method = fields.get("quant_method")
        if method != METHOD:
            _refuse(where, f"quant_method {_shown(method)}", repr(METHOD))
        status = fields.get("quantization_status", "compressed")
        if status not in _STATUSES:
            _refuse(where, f"quantization_status {_shown(status)}", "'compressed' or 'frozen'")
        for key in ("transform_config", "moe_sparsity_config"):
            if fields.get(key):
                _refuse(where, key)
        sparsity = fields.get("sparsity_config")
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
            _refuse(where, "sparsity_config")
        groups = _object(fields.get("config_groups"), "config_groups", where)
        return cls(
            groups=tuple(_read_group(value, name, fields.get("format"), where) for name, value in groups.items()),
            ignore=_patterns(fields.get("ignore") or [], "ignore", where),
            has_cache=bool(fields.get("kv_cache_scheme")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The value of `quantization_config`, as transformers and vLLM read it."""
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": list(self.ignore),
            "config_groups": {
                f"group_{index}": {
                    "targets": list(group.targets),
                    "weights": _weights_dict(group),
                    "input_activations": None,
                    "output_activations": None,
                }
                for index, group in enumerate(self.groups)
            },
        }


def _weights_dict(group: ConfigGroup) -> dict[str, Any]:
    scheme = group.scheme
    if isinstance(scheme, Fp8Scheme):
        raise ValueError(f"{scheme} is read, never written")
    return {
        "num_bits": scheme.num_bits,
        "type": "int",
        "symmetric": scheme.is_symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": "group" if group.has_group_index else None,
    }


def _read_group(value: object, name: str, default_format: object, where: str) -> ConfigGroup:
    where = f"{where}: config_groups.{_shown(name)}"
    if isinstance(value, list):
        _refuse(where, "a scheme by preset name", "the scheme written out")
    group = _object(value, "group", where)
    _refuse_unknown_keys(group, _GROUP_KEYS, where)
    group_format = group.get("format") or default_format
    weights = _object(group.get("weights"), "weights", where)
    if group_format == NAIVE_FORMAT:
        group_format = FLOAT_FORMAT if weights.get("type") == "float" else INT_FORMAT
    if group_format not in (FORMAT, INT_FORMAT, FLOAT_FORMAT):
        _refuse(where, f"format {_shown(group_format)}", f"{FORMAT!r}, {INT_FORMAT!r} or {FLOAT_FORMAT!r}")
    for key in ("input_activations", "output_activations"):
        # Weights of one byte each are those of w8a8 models, which lose nothing if activations are not rounded.
        if group.get(key) is not None and group_format == FORMAT:
            _refuse(where, key, "weights only")
    scheme: WeightScheme | Fp8Scheme
    if group_format == FLOAT_FORMAT:
        scheme = _read_floats(weights, f"{where}.weights")
    else:
        scheme = _read_weights(weights, f"{where}.weights")
    if group_format == INT_FORMAT and isinstance(scheme, WeightScheme) and scheme.num_bits != 8:
        _refuse(f"{where}.weights", f"num_bits {scheme.num_bits} of {INT_FORMAT}", "8")
    return ConfigGroup(
        targets=_patterns(group.get("targets"), "targets", where),
        scheme=scheme,
        format=group_format,
        has_group_index=weights.get("actorder") in _GROUP_ORDERS,
        has_activations=group.get("input_activations") is not None,
    )


def _read_weights(weights: Mapping[str, Any], where: str) -> WeightScheme:
    _refuse_unknown_keys(weights, _WEIGHTS_KEYS, where)
    if weights.get("type", "int") != "int":
        _refuse(where, f"type {_shown(weights['type'])}", "'int'")
    num_bits = weights.get("num_bits", 8)
    if type(num_bits) is not int or num_bits not in (4, 8):
        _refuse(where, f"num_bits {_shown(num_bits)}", "4 or 8")
    if weights.get("dynamic"):
        _refuse(where, f"dynamic {_shown(weights['dynamic'])}", "false")
    actorder = weights.get("actorder")
    if not isinstance(actorder, str | bool | None) or actorder not in (*_PLAIN_ORDERS, *_GROUP_ORDERS):
        _refuse(where, f"actorder {_shown(actorder)}")
    scale_dtype = weights.get("scale_dtype")
    if scale_dtype is not None and str(scale_dtype).removeprefix("torch.") not in _SCALE_DTYPES:
        _refuse(where, f"scale_dtype {_shown(scale_dtype)}", ", ".join(sorted(_SCALE_DTYPES)))
    is_symmetric = weights.get("symmetric", True)
    if not isinstance(is_symmetric, bool):
        raise CheckpointError(f"{where}: symmetric is {_shown(is_symmetric)}, expected true or false")
    return WeightScheme(num_bits, _read_group_size(weights, where), is_symmetric)


def _read_floats(weights: Mapping[str, Any], where: str) -> Fp8Scheme:
    """The scheme of 8-bit floats; their tensors show which type it is: e4m3."""
    _refuse_unknown_keys(weights, _WEIGHTS_KEYS | {"block_structure"}, where)
    if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
        what = ", ".join(f"{key} {_shown(weights.get(key))}" for key in ("type", "num_bits", "symmetric"))
        _refuse(where, what, "symmetric floats of 8 bits")
    if weights.get("dynamic") or weights.get("actorder"):
        _refuse(where, "dynamic or ordered weights")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy == "block":
        return Fp8Scheme(*read_block(block, "block_structure", where))
    blocks = {"tensor": Fp8Scheme(None, None), "channel": Fp8Scheme(1, None)}
    if not isinstance(strategy, str) or strategy not in blocks:
        _refuse(where, f"strategy {_shown(strategy)}", "'tensor', 'channel' or 'block'")
    return blocks[strategy]


def read_block(value: object, name: str, where: str) -> tuple[int, int]:
    """The rows and inputs of a block of weights. Raises: CheckpointError for anything but two numbers from 1 up"""
    if isinstance(value, str) and (sizes := _BLOCK.fullmatch(value)):  # as compressed-tensors wrote it at first
        value = [int(size) for size in sizes.groups()]
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise CheckpointError(f"{where}: {name} is {_shown(value)}, expected two numbers from 1 up")


def _read_group_size(weights: Mapping[str, Any], where: str) -> int | None:
    """The group size, None for one scale a row; without a strategy the group size decides."""
    group_size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    if strategy == "channel" and group_size in (None, -1):
        return None
    if strategy not in ("channel", "group"):
        _refuse(where, f"strategy {_shown(strategy)}", "'channel' or 'group'")
    if strategy == "channel" or type(group_size) is not int or group_size < 1:
        raise CheckpointError(f"{where}: group_size {_shown(group_size)} does not go with strategy {strategy!r}")
    return group_size


def _object(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{where}: {name} is {_shown(value)}, expected an object with entries")
    return value


def _patterns(value: object, name: str, where: str) -> tuple[str, ...]:
    """A list of names and `re:` patterns, which are checked as regular expressions only when used."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{where}: {name} is {_shown(value)}, expected a list of strings")
    return tuple(value)


def _refuse_unknown_keys(values: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(key for key in values.keys() - known if values[key] is not None):
        _refuse(where, _shown(unknown[0]))


def _refuse(where: str, what: str, expected: str | None = None) -> NoReturn:
    hint = f", expected {expected}" if expected else ""
    raise UnsupportedModelError(f"{where}: {what} is not supported{hint}; use the original model or another export")


def _shown(value: object) -> str:
    return reprlib.repr(value)


# The quantization in config.json by its method: compressed-tensors, AWQ, GPTQ or fp8.
#
# Reads bits, groups and zero points. Only compressed-tensors lists the quantized layers: otherwise the tensors show
# them. Refuses other methods, and other forms of these, by name. Source: transformers'
# quantization_config.py; autoawq 0.2.9; gptqmodel 7.7.

AWQ, GPTQ, FP8 = "awq", "gptq", "fp8"
# Others that store 8-bit floats like fp8: Meta's, with a scale a row, and NVIDIA's, with one.
_FBGEMM, _MODELOPT = "fbgemm_fp8", "modelopt"

_GPTQ_BITS = (4, 8)
# What GPTQ files of each version subtract from zero points.
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

    `orders_inputs` is `desc_act`: whether inputs were sorted before they were grouped; None if it is missing.
    """

    scheme: WeightScheme
    zero_offset: int
    orders_inputs: bool | None


@dataclass(frozen=True)
class Fp8Config:
    """8-bit floats with scales. `scheme` is None without blocks: then the shape of the scales decides."""

    scheme: Fp8Scheme | None


Quantization = QuantizationConfig | AwqConfig | GptqConfig | Fp8Config


def read_quantization(declared: object, where: str) -> Quantization:
    """Read the value of `quantization_config`; `where` names the file in messages.

    Raises: UnsupportedModelError naming an unsupported method or feature; CheckpointError for values that the method
    does not allow.
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
            _refuse_method(inside, f"quant_algo {_shown(fields.get('quant_algo'))}", "FP8")
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
    """The method of a `quantization_config`; bitsandbytes did not always write it, and MLX does not."""
    if method := fields.get("quant_method"):
        return method
    if not fields.keys().isdisjoint({"load_in_8bit", "load_in_4bit"}):
        return "bitsandbytes"
    return "mlx" if fields.keys() >= {"bits", "group_size"} else "unknown"


def refuse_method(method: object, where: str) -> NoReturn:
    """Refuse weights by their method's name. Raises: UnsupportedModelError"""
    raise UnsupportedModelError(
        f"{where} says that the weights are quantized (method {reprlib.repr(method).strip(chr(39))}), which is not "
        f"supported; use the original model in bf16, fp16 or fp32, which `llmcli quantize` makes as small, or one "
        f"quantized by {METHOD}, {AWQ}, {GPTQ} or {FP8}"
    )


def _read_awq(fields: Mapping[str, Any], where: str) -> AwqConfig:
    version = _word(fields, ("version", "format", "checkpoint_format"), "gemm", where)
    if version != "gemm" or fields.get("backend") == "llm-awq":
        _refuse_method(where, f"AWQ version {fields.get('backend') if version == 'gemm' else version}", "gemm")
    bits = _number(fields, ("bits", "w_bit"), where)
    if bits != 4:
        _refuse_method(where, f"AWQ with bits {bits}", "4")
    if not _flag(fields, "zero_point", where):
        _refuse_method(where, "AWQ with zero_point false", "true")
    return AwqConfig(WeightScheme(4, _group_size(fields, ("group_size", "q_group_size"), where), is_symmetric=False))


def _read_gptq(fields: Mapping[str, Any], where: str) -> GptqConfig:
    version = _word(fields, ("checkpoint_format", "format"), "gptq", where)
    if version not in _GPTQ_OFFSETS or fields.get("is_marlin_format"):
        _refuse_method(
            where, f"GPTQ format {'marlin' if fields.get('is_marlin_format') else version}", "gptq or gptq_v2"
        )
    if fields.get("pack_dtype") not in (None, "int32"):
        _refuse_method(where, f"GPTQ with pack_dtype {_shown(fields['pack_dtype'])}", "int32")
    bits = _number(fields, ("bits",), where)
    if bits not in _GPTQ_BITS:
        _refuse_method(where, f"GPTQ with bits {bits}", "4 or 8")
    for key in _GPTQ_EXTRAS:
        if fields.get(key):
            _refuse_method(where, f"GPTQ with {key}")
    dynamic = fields.get("dynamic") or {}
    # "-:" leaves layers as they are, which their tensors show too; other entries give layers bits of their own.
    if not isinstance(dynamic, dict) or any(not name.startswith("-:") for name in dynamic):
        _refuse_method(where, "GPTQ with bits that differ between layers (dynamic)")
    is_symmetric = _flag(fields, "sym", where)
    scheme = WeightScheme(bits, _group_size(fields, ("group_size",), where), is_symmetric)
    orders_inputs = None if fields.get("desc_act") is None else _flag(fields, "desc_act", where)
    return GptqConfig(scheme, _GPTQ_OFFSETS[version], orders_inputs)


def _read_fp8(fields: Mapping[str, Any], where: str) -> Fp8Config:
    for key, expected in (("fmt", "e4m3"), ("scale_fmt", "float")):
        if fields.get(key) not in (None, expected):
            _refuse_method(where, f"fp8 with {key} {_shown(fields[key])}", expected)
    block = fields.get("weight_block_size")
    return Fp8Config(None if block is None else Fp8Scheme(*read_block(block, "weight_block_size", where)))


def _value(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    """The value of the fields with these names, None if all are missing; they must not contradict one another."""
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


def _refuse_method(where: str, what: str, expected: str | None = None) -> NoReturn:
    hint = f", expected {expected}" if expected else ""
    raise UnsupportedModelError(
        f"{where}: {what} is not supported{hint}; use the same model as AWQ gemm, as GPTQ of 4 or 8 bits, as fp8 "
        "(e4m3), or in 16 bits"
    )
