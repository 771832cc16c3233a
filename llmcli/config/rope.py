"""Rotary position embedding: its parameters as config.json writes them, and the inverse frequencies they mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.config.fields import Fields
from llmcli.errors import UnsupportedModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeParameters:
    """Rotary parameters under Hugging Face's names; fields a type does not use keep their neutral value."""

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

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
        return inverse

    def _llama3(self, inverse: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
        context = self.original_max_position_embeddings
        wavelength = np.float32(2 * np.pi) / inverse
        stretched = inverse / np.float32(self.factor)
        smooth = (np.float32(context) / wavelength - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (np.float32(1) - smooth) * inverse / np.float32(self.factor) + smooth * inverse
        is_long = wavelength > context / self.low_freq_factor
        is_short = wavelength < context / self.high_freq_factor
        return np.where(is_long, stretched, np.where(is_short, inverse, blended)).astype(np.float32)


def read_rope_parameters(config: Mapping[str, Any], where: str) -> RopeParameters:
    """Rotary parameters from a config.json object.

    Reads both spellings: `rope_parameters` (one object), and the older `rope_theta` beside `rope_scaling`, whose
    type stands under `rope_type` or, older still, `type`.
    Raises: UnsupportedModelError for a rotary type this program does not compute; CheckpointError for bad values.
    """
    top = Fields(config, where)
    values = dict(top.object("rope_scaling")) | dict(top.object("rope_parameters"))
    rope = Fields(values, f"{where}: rotary parameters")
    rope_type = rope.string("rope_type", rope.string("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise UnsupportedModelError(f"{where}: rotary type {rope_type!r} is not supported, expected one of {supported}")
    if rope.positive_float("partial_rotary_factor", top.positive_float("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(f"{where}: partial_rotary_factor other than 1 is not supported")
    rope_theta = rope.positive_float("rope_theta", top.positive_float("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeParameters("default", rope_theta)
    if rope_type == "linear":
        return RopeParameters("linear", rope_theta, factor=rope.positive_float("factor"))
    parameters = RopeParameters(
        "llama3",
        rope_theta,
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int(
            "original_max_position_embeddings", top.positive_int("max_position_embeddings", 2048)
        ),
    )
    if parameters.high_freq_factor <= parameters.low_freq_factor:
        raise UnsupportedModelError(
            f"{where}: high_freq_factor {parameters.high_freq_factor} must be above "
            f"low_freq_factor {parameters.low_freq_factor}"
        )
    return parameters
