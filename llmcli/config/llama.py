"""Everything about a model's shape: `LlamaConfig`, read from config.json and checked; families, by model_type."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.config.fields import Fields, shown
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.reading import check_value

# Rotary position embedding: its parameters as config.json writes them, and the inverse frequencies they mean.

SUPPORTED_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
MAX_ATTENTION_FACTOR = 1e6  # its square multiplies the scores, which float32 has to hold


@dataclass(frozen=True)
class RopeParameters:
    """Rotary parameters under Hugging Face's names; fields a type does not use keep their neutral value."""

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # yarn multiplies cos and sin by it, and so the scores by its square

    def inverse_frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Angle per position of each rotated pair (i, i + head_dim / 2).

        Shapes: result [head_dim / 2] float32
        Units:  radians per token
        Source: Hugging Face modeling_rope_utils.py. Exponent, power and reciprocal are each rounded to float32, as
                there and in the code the models were trained with: at position 100,000 a last-bit difference of an
                inverse frequency is already a visible angle.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = np.power(np.float64(self.rope_theta), exponents.astype(np.float64)).astype(np.float32)
        inverse = np.float32(1.0) / powers
        if self.rope_type == "linear":
            return inverse / np.float32(self.factor)
        if self.rope_type == "llama3":
            return self._llama3(inverse)
        if self.rope_type == "yarn":
            return self._yarn(powers)
        return inverse

    def _llama3(self, inverse: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
        context = self.original_max_position_embeddings
        # torch divides a number by a tensor as the reciprocal times the number, and so these lines do.
        wavelength = np.float32(1) / inverse * np.float32(2 * np.pi)
        stretched = inverse / np.float32(self.factor)
        smooth = (np.float32(1) / wavelength * np.float32(context) - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (np.float32(1) - smooth) * inverse / np.float32(self.factor) + smooth * inverse
        is_long = wavelength > context / self.low_freq_factor
        is_short = wavelength < context / self.high_freq_factor
        return np.where(is_long, stretched, np.where(is_short, inverse, blended)).astype(np.float32)

    def _yarn(self, powers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Fast pairs are kept, slow ones stretched by `factor`, a linear ramp between (arXiv 2309.00071, section 3.2).

        The ramp runs between the pairs that turn `beta_fast` and `beta_slow` times within the original context.
        """
        num_pairs = len(powers)
        low, high = (
            num_pairs
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / math.log(self.rope_theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        if low == high:
            high += 0.001  # as Hugging Face does: no division by zero
        ramp = (np.arange(num_pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
        stretched = np.float32(1) / (np.float32(self.factor) * powers)
        blended: npt.NDArray[np.float32] = stretched * (np.float32(1) - kept) + np.float32(1) / powers * kept
        return blended


def read_rope_parameters(top: Fields) -> RopeParameters:
    """Rotary parameters from a config.json object.

    Reads both spellings: `rope_parameters` (one object), and the older `rope_theta` with `rope_scaling`, whose
    type stands under `rope_type` or, older still, `type`. Which of two values counts, and what null means, is as in
    transformers: it asks for the value of some keys and for the presence of others.
    Raises: UnsupportedModelError for a rotary type this program does not compute; CheckpointError for bad values.
    """
    values = _rotary_object(top)
    rope = Fields(values, f"{top.where}: rotary parameters")
    rope_type = rope.string("rope_type" if "rope_type" in values else "type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise UnsupportedModelError(
            f"{top.where}: rotary type {shown(rope_type)} is not supported, expected one of {supported}"
        )
    if nested := [key for key, value in values.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(
            f"{top.where}: rotary parameters by layer type ({', '.join(nested)}) are not supported"
        )
    partial = 1.0 if top.is_null("partial_rotary_factor") else top.values["partial_rotary_factor"]
    if values.get("partial_rotary_factor", partial) != 1.0:
        raise UnsupportedModelError(f"{top.where}: partial_rotary_factor other than 1 is not supported")
    rope_theta = (rope if "rope_theta" in values else top).positive_float("rope_theta", 10000.0)
    if rope_type == "dynamic":
        rope.positive_float("factor")  # of what comes after the model's context, where no text goes
    if rope_type in ("default", "dynamic"):
        return RopeParameters("default", rope_theta)
    if rope_type == "linear":
        return RopeParameters("linear", rope_theta, factor=rope.positive_float("factor"))
    max_position_embeddings = top.positive_int("max_position_embeddings", 2048)
    original = _original_max_position_embeddings(top, rope, max_position_embeddings)
    if rope_type == "yarn":
        return _read_yarn(rope, rope_theta, original, max_position_embeddings)
    low_freq_factor, high_freq_factor = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high_freq_factor <= low_freq_factor:
        raise UnsupportedModelError(
            f"{top.where}: high_freq_factor {high_freq_factor} must be above low_freq_factor {low_freq_factor}"
        )
    return RopeParameters(
        "llama3",
        rope_theta,
        factor=rope.positive_float("factor"),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position_embeddings=original,
    )


def _rotary_object(top: Fields) -> Mapping[str, Any]:
    """`rope_scaling` if it says anything, else `rope_parameters`: transformers never mixes the two."""
    scaling, parameters = top.object("rope_scaling"), top.object("rope_parameters")
    if scaling and parameters and scaling != parameters:
        top.notes.append("rope_scaling is used, rope_parameters is not")
    return scaling or parameters


def _original_max_position_embeddings(top: Fields, rope: Fields, default: int) -> float:
    """The training context before it was stretched. The value next to the rotary object wins over the one in it."""
    key = "original_max_position_embeddings"
    found = [fields for fields in (rope, top) if key in fields.values]
    values = [fields.positive_float(key) for fields in found]
    if small := [fields for fields, value in zip(found, values, strict=True) if value < 1]:
        raise small[0].wrong(key, "at least 1")
    if len(values) == 2 and values[0] != values[1]:
        top.notes.append(f"{key} is {values[1]:g}, the {values[0]:g} among the rotary parameters is not used")
    return values[-1] if values else default


def _read_yarn(rope: Fields, rope_theta: float, original: float, max_position_embeddings: int) -> RopeParameters:
    """The attention factor is 0.1 * ln(factor) + 1 unless the file names it or the two mscale values.

    A null factor is the ratio of the two contexts. Zero is as good as null for all but the attention factor.
    """
    if rope_theta == 1.0:
        raise UnsupportedModelError(f"{rope.where}: rope_theta 1 has no wavelengths to stretch by yarn")
    has_null_factor = "factor" in rope.values and rope.is_null("factor")
    factor = max_position_embeddings / original if has_null_factor else rope.positive_float("factor")
    attention_factor = rope.optional_number("attention_factor")
    mscale, mscale_all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if attention_factor is None:
        attention_factor = _magnitude(factor, 1.0)
        if mscale and mscale_all_dim:
            below = _magnitude(factor, mscale_all_dim)
            attention_factor = _magnitude(factor, mscale) / below if below else math.inf
    if abs(attention_factor) > MAX_ATTENTION_FACTOR:
        raise UnsupportedModelError(
            f"{rope.where}: attention_factor {attention_factor:g} is not supported, "
            f"expected at most {MAX_ATTENTION_FACTOR:g}"
        )
    return RopeParameters(
        "yarn",
        rope_theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_turns(rope, "beta_fast", 32.0),
        beta_slow=_turns(rope, "beta_slow", 1.0),
        truncate=rope.boolean("truncate", True) if rope.values.get("truncate", True) is not None else False,
        attention_factor=attention_factor,
    )


def _turns(rope: Fields, key: str, default: float) -> float:
    value = rope.optional_number(key) or default
    if value < 0:
        raise rope.wrong(key, "a positive number")
    return value


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


# The families of LLaMA-like models: for each `model_type`, its architecture, its defaults and what it adds.
#
# A family is listed here if its forward pass is LLaMA's with these traits; every other `model_type` is refused by
# name. Source: Hugging Face's configuration and modeling files of each family.

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Traits:
    """What a family adds to plain LLaMA. The tuples have one entry per layer."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each query and each key head, before the rotation
    sliding_windows: tuple[int | None, ...]  # tokens a layer looks back at, itself included; None is all
    uses_rope: tuple[bool, ...]


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    `defaults` are the values Hugging Face assumes where config.json lacks a key. `derived_if_null` are the keys whose
    null means a value that follows from the others, not the default; other families refuse that null. `rope` are the
    rotary parameters where the file has none. `saved_as` is another architecture that transformers writes.
    """

    architecture: str
    read_traits: Callable[[Fields, int], Traits]
    defaults: Mapping[str, Any]
    derived_if_null: frozenset[str]
    rope: Mapping[str, Any] | None = None
    saved_as: str | None = None

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The object with the defaults, and without the nulls that mean a derived value."""
        values = {**self.defaults, **config}
        if self.rope and config.get("rope_scaling") is None and config.get("rope_parameters") is None:
            values["rope_parameters"] = self.rope
        return {key: value for key, value in values.items() if value is not None or key not in self.derived_if_null}


def _traits(num_layers: int, *, has_bias: bool = False, **traits: Any) -> Traits:
    plain: dict[str, Any] = {
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_windows": (None,) * num_layers,
        "uses_rope": (True,) * num_layers,
    }
    return Traits(**{**plain, **traits})


def _llama(fields: Fields, num_layers: int) -> Traits:
    _refuse_windows(fields, num_layers)
    return _traits(
        num_layers, has_bias=fields.boolean("attention_bias", False), mlp_bias=fields.boolean("mlp_bias", False)
    )


def _refuse_windows(fields: Fields, num_layers: int) -> None:
    if SLIDING in _layer_types(fields, [FULL] * num_layers):
        # transformers would then let the prompt see everything, and later tokens a window.
        family = fields.string("model_type")
        raise UnsupportedModelError(f"{fields.where}: layer type {SLIDING} is not supported for {family}")


def _mistral(fields: Fields, num_layers: int) -> Traits:
    default = FULL if fields.is_null("sliding_window") else SLIDING
    return _traits(num_layers, sliding_windows=_windows(fields, _layer_types(fields, [default] * num_layers)))


def _cwm(fields: Fields, num_layers: int) -> Traits:
    fields.positive_float("rope_theta")  # unused where `rope_parameters` has one
    if fields.is_null("sliding_window"):
        raise fields.wrong("sliding_window", "a number")
    default = [FULL if index % 4 == 0 else SLIDING for index in range(num_layers)]
    windows = _windows(fields, _layer_types(fields, default))
    return _traits(num_layers, mlp_bias=fields.boolean("mlp_bias", False), sliding_windows=windows)


def _seed_oss(fields: Fields, num_layers: int) -> Traits:
    _refuse_windows(fields, num_layers)
    return _traits(
        num_layers,
        qkv_bias=fields.boolean("attention_bias", True),
        o_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _internlm3(fields: Fields, num_layers: int) -> Traits:
    _refuse_windows(fields, num_layers)
    # The first names are those of published files, the second ones are how transformers saves them.
    has_bias = fields.boolean("qkv_bias", fields.boolean("attention_bias", False))
    of_others = fields.boolean("bias", fields.boolean("mlp_bias", False))
    if has_bias != of_others:
        raise UnsupportedModelError(f"{fields.where}: qkv_bias and bias differ, which transformers does not run either")
    return _traits(num_layers, has_bias=has_bias, mlp_bias=of_others)


def _qwen2(fields: Fields, num_layers: int) -> Traits:
    return _traits(num_layers, qkv_bias=True, sliding_windows=_qwen_windows(fields, num_layers))


def _qwen3(fields: Fields, num_layers: int) -> Traits:
    return _traits(
        num_layers,
        has_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        sliding_windows=_qwen_windows(fields, num_layers),
    )


def _smollm3(fields: Fields, num_layers: int) -> Traits:
    uses_rope = _smollm3_rope(fields, num_layers)
    is_used = fields.boolean("use_sliding_window", False)
    has_window = is_used and not fields.is_null("sliding_window")
    types = _layer_types(fields, [SLIDING if has_window and not has_rope else FULL for has_rope in uses_rope])
    if SLIDING in types and not is_used:
        # transformers masks by layer_types and never asks use_sliding_window there.
        fields.notes.append("use_sliding_window is false, but layer_types has sliding windows: they are used")
    return _traits(
        num_layers,
        has_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_windows=_windows(fields, types),
        uses_rope=uses_rope,
    )


def _smollm3_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: those that no_rope_layers gives a 1, despite its name, or all but every fourth one."""
    interval = fields.integer("no_rope_layer_interval", 4)
    if fields.is_null("no_rope_layers"):
        if interval == 0:
            raise fields.wrong("no_rope_layer_interval", "another number than 0")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    flags = fields.int_list("no_rope_layers", [])
    if len(flags) < num_layers:
        raise CheckpointError(f"{fields.where}: no_rope_layers has {len(flags)} entries, expected {num_layers}")
    return tuple(flag != 0 for flag in flags[:num_layers])


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The first max_window_layers layers see everything, the others a window, unless layer_types says otherwise."""
    is_used = fields.boolean("use_sliding_window", False)
    has_window = is_used and not fields.is_null("sliding_window")
    first = fields.integer("max_window_layers", 28)
    types = _layer_types(fields, [SLIDING if has_window and index >= first else FULL for index in range(num_layers)])
    if SLIDING in types and not is_used:
        raise CheckpointError(f"{fields.where}: layer_types has {SLIDING}, but use_sliding_window is not true")
    return _windows(fields, types)


def _layer_types(fields: Fields, default: list[str]) -> list[str]:
    types = fields.string_list("layer_types", default)
    if len(types) != len(default):
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries, expected {len(default)}")
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise UnsupportedModelError(
            f"{fields.where}: layer type {shown(unknown[0])} is not supported, expected {FULL} or {SLIDING}"
        )
    return types


def _windows(fields: Fields, types: list[str]) -> tuple[int | None, ...]:
    if SLIDING not in types:
        return (None,) * len(types)
    if fields.is_null("sliding_window"):
        raise CheckpointError(f"{fields.where}: layer_types has {SLIDING}, but there is no sliding_window")
    window = fields.positive_int("sliding_window")
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


_BOTH = frozenset({"head_dim", "num_key_value_heads"})
_KV_HEADS = frozenset({"num_key_value_heads"})
_MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {"sliding_window": 4096, "num_key_value_heads": 32, "max_position_embeddings": 32768}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, {}, _BOTH),
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        _MISTRAL,
        frozenset({"head_dim"}),
    ),
    "ministral": Family("MinistralForCausalLM", _mistral, _MISTRAL, frozenset({"head_dim"})),
    "cwm": Family(
        "CwmForCausalLM",
        _cwm,
        {
            "sliding_window": 8192,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        frozenset(),
        rope={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _seed_oss,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
        _BOTH,
    ),
    "internlm3": Family(
        "InternLM3ForCausalLM",
        _internlm3,
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
        _BOTH,
        saved_as="LlamaForCausalLM",
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _QWEN, _KV_HEADS),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, {**_QWEN, "head_dim": 128}, _KV_HEADS),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        _KV_HEADS,
    ),
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family a config.json belongs to.

    Raises: UnsupportedModelError naming the model_type or architecture this program does not run.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"{where}: model_type {shown(model_type)} is not supported, expected one of: {supported}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if architectures not in ([family.architecture], [family.saved_as]):
        raise UnsupportedModelError(
            f"{where}: architectures {shown(architectures)} is not supported, expected [{family.architecture!r}]"
        )
    return family


# `LlamaConfig`: everything about a model's shape, read from a Hugging Face config.json and checked.

# Far beyond any model: a damaged number shall neither fill the memory with names of tensors, nor give a matrix more
# bytes than 64 bits count.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**24


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a LLaMA-like model, under Hugging Face's names; `traits` is what its family adds."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    tie_word_embeddings: bool
    traits: Traits
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]  # what a user should know about settings that contradict each other, one line each

    @property
    def q_size(self) -> int:
        """Width of the query projection: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    def kv_cache_bytes(self, num_tokens: int, itemsize: int, scale_bytes: int = 0) -> int:
        """Bytes of K and V for `num_tokens` positions of one row in elements of `itemsize` bytes.

        `scale_bytes` are those of the scale stored with a head's vector.
        """
        head_bytes = self.head_dim * itemsize + scale_bytes
        return 2 * self.num_hidden_layers * self.num_key_value_heads * num_tokens * head_bytes

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> "LlamaConfig":
        """The model's shape from a config.json object; `where` names the file in messages.

        Raises: UnsupportedModelError for another architecture, activation or rotary type; CheckpointError for
                missing or impossible values.
        """
        try:
            check_value(config)
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from error
        family = family_of(config, where)
        fields = Fields(family.complete(config), where)
        _refuse_other_forward_passes(fields)
        hidden_size = fields.positive_int("hidden_size", at_most=MAX_WIDTH)
        num_attention_heads = fields.positive_int("num_attention_heads", at_most=MAX_WIDTH)
        num_key_value_heads = fields.positive_int("num_key_value_heads", num_attention_heads)
        num_hidden_layers = fields.positive_int("num_hidden_layers", at_most=MAX_LAYERS)
        return cls(
            model_type=fields.string("model_type"),
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size", at_most=MAX_WIDTH),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=_head_dim(fields, hidden_size, num_attention_heads, num_key_value_heads),
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.positive_int("max_position_embeddings", 2048),
            rope=read_rope_parameters(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            traits=family.read_traits(fields, num_hidden_layers),
            bos_token_ids=fields.token_ids("bos_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            notes=tuple(fields.notes),
        )


def _refuse_other_forward_passes(fields: Fields) -> None:
    """Refuse what transformers reads for every family and this program computes for none."""
    if (activation := fields.string("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{fields.where}: hidden_act {shown(activation)} is not supported, expected 'silu'")
    if fields.values.get("is_causal", True) is not True:  # transformers takes null for false
        raise UnsupportedModelError(f"{fields.where}: is_causal other than true is not supported")
    if not fields.is_null("per_layer_config"):
        raise UnsupportedModelError(f"{fields.where}: per_layer_config is not supported")


def _head_dim(fields: Fields, hidden_size: int, num_attention_heads: int, num_key_value_heads: int) -> int:
    if "head_dim" not in fields.values and hidden_size % num_attention_heads:
        raise UnsupportedModelError(
            f"{fields.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
        )
    head_dim = fields.positive_int("head_dim", hidden_size // num_attention_heads)
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: head_dim {head_dim} is odd, rotary embedding needs pairs")
    if num_attention_heads % num_key_value_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_key_value_heads}"
        )
    if num_attention_heads * head_dim > MAX_WIDTH:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {num_attention_heads} * head_dim {head_dim} is over {MAX_WIDTH}"
        )
    return head_dim
