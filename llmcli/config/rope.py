"""Rotary position embedding: its parameters as config.json writes them, and the inverse frequencies they mean."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.config.fields import Fields, shown
from llmcli.errors import UnsupportedModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
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
    if rope_type == "default":
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
