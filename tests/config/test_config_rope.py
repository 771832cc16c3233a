"""Inverse frequencies against transformers, and the resulting angles far beyond the original context."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from llmcli.config.fields import Fields
from llmcli.config.llama import RopeParameters, read_rope_parameters
from llmcli.errors import CheckpointError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
ROPES: dict[str, dict[str, Any]] = {
    "llama 2": {"rope_theta": 10000.0},
    "llama 3": {"rope_theta": 500000.0},
    "smollm": {"rope_theta": 130000},
    "llama 3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA31},
    "llama 3.2": {"rope_theta": 500000.0, "rope_scaling": {**LLAMA31, "factor": 32.0}},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new spelling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    "default, new spelling": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "yarn, qwen 2.5": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn, untruncated": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    },
    "null scaling": {"rope_theta": 10000.0, "rope_scaling": None},
    "yarn, two mscales": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "yarn, null mscales": {"rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None}},
    "yarn, one null mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": None}},
    "yarn, a zero mscale": {"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0.7}},
    "yarn, a negative mscale": {"rope_scaling": {**YARN, "mscale": -1.5, "mscale_all_dim": 0.7}},
    "yarn, null truncate": {"rope_scaling": {**YARN, "truncate": None}},
    "yarn, null betas": {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": None}},
    "yarn, zero betas": {"rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": 0.0}},
    "yarn, null attention factor": {"rope_scaling": {**YARN, "attention_factor": None}},
    "yarn, zero attention factor": {"rope_scaling": {**YARN, "attention_factor": 0.0, "mscale": 1.0}},
    "yarn, negative attention factor": {"rope_scaling": {**YARN, "attention_factor": -0.8}},
    "yarn, null factor": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, theta below one": {"rope_theta": 0.5, "rope_scaling": YARN},
    "yarn, context beside it": {"rope_scaling": YARN, "original_max_position_embeddings": 512},
    "yarn, fractional context": {"rope_scaling": {**YARN, "original_max_position_embeddings": 2048.5}},
    "llama3, context beside it": {"rope_scaling": LLAMA31, "original_max_position_embeddings": 1024},
    "llama3, no context": {"rope_scaling": {**LLAMA31, "original_max_position_embeddings": 131072}},
    "yarn beside default": {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "nothing beside yarn": {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 500.0}, "rope_theta": 1e6},
    "null theta beside one": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "both types": {"rope_scaling": {"type": "linear", "rope_type": "default"}},
    "null partial factor": {"partial_rotary_factor": None},
}


def read(config: dict[str, Any]) -> RopeParameters:
    return read_rope_parameters(Fields(config, "config.json"))


HEAD_DIMS = [8, 48, 64, 80, 128, 256]


# Each with two sizes of heads, each size with a third of them.
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(name, size) for place, name in enumerate(ROPES) for size in (HEAD_DIMS * 2)[place % 6 : place % 6 + 4 : 3]],
)
def test_inverse_frequencies_equal_transformers(name: str, head_dim: int) -> None:
    config = {"max_position_embeddings": 131072, **ROPES[name]}
    hf_config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **deepcopy(config)
    )
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_config).inv_freq.numpy()
    ours = read(config).inverse_frequencies(head_dim)
    assert ours.dtype == np.float32
    assert ours.shape == (head_dim // 2,)
    # The last bit may differ in one of hundreds of places, where the two libraries round a power differently; the
    # interpolation of llama3 can turn it into a few bits.
    np.testing.assert_allclose(ours, reference, rtol=1e-6)
    assert np.mean(ours != reference) < 0.05
    # At position 1,000,000 such a last bit is an angle, and must still be a small one.
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_config)
    assert read(config).attention_factor == pytest.approx(rope.attention_scaling, 1e-12)
    angles, expected = np.float32(1e6) * ours.astype(np.float64), np.float32(1e6) * reference.astype(np.float64)
    assert np.abs(np.cos(angles) - np.cos(expected)).max() < 0.05


def test_llama3_values_by_hand() -> None:
    """Short wavelengths are kept, long ones divided by the factor."""
    rope = read({"rope_theta": 500000.0, "rope_scaling": LLAMA31})
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    ours = rope.inverse_frequencies(128)
    short, long = 2 * np.pi / plain < 8192 / 4, 2 * np.pi / plain > 8192
    assert short.sum() > 10
    assert long.sum() > 10
    np.testing.assert_allclose(ours[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(ours[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert np.all((ours[between] > plain[between] / 8) & (ours[between] < plain[between]))


@pytest.mark.parametrize("rope_type", ["longrope", "mrope", "su"])
def test_unknown_rotary_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rotary type '{rope_type}' is not supported, expected one of"):
        read({"rope_scaling": {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": "many"}, "rope_theta is 'many', expected a positive number"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a positive number"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing, expected a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA31, "high_freq_factor": 1.0}}, "high_freq_factor 1.0 must be above"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type .full_attention. are not"),
        ({"rope_theta": None}, "rope_theta is null, expected a positive number"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_theta": None}}, "parameters: rope_theta is null"),
        ({"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, "rope_type is null, expected a string"),
        ({"rope_scaling": {"type": None}}, "type is null, expected a string"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor is null"),
        ({"rope_scaling": {**LLAMA31, "low_freq_factor": None}}, "low_freq_factor is null"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position.* is null"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": None}, "original_max_position.* is null"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 0.5}, "is 0.5, expected at least 1"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast is -1, expected a positive number"),
        ({"rope_scaling": {**YARN, "mscale": True}}, "mscale is True, expected a number"),
        ({"rope_scaling": {**YARN, "mscale": 1e30}}, "mscale is 1e.30, expected 0 or a number from 1e-15 to 1e.15"),
        ({"rope_scaling": {**YARN, "attention_factor": 1e10}}, "attention_factor 1e.10 is not supported"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "truncate is 0, expected true or false"),
        ({"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}, "factor is missing"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta 1 has no wavelengths"),
        ({"rope_theta": 1e16}, "rope_theta is 1e.16, expected a number from 1e-15 to 1e.15"),
        ({"rope_theta": 10**400}, "rope_theta is 10+[.]{3}, expected a number from 1e-15"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ],
)
def test_impossible_rotary_parameters_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        (ROPES["yarn beside default"], ["rope_scaling is used, rope_parameters is not"]),
        (ROPES["nothing beside yarn"], []),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, []),
        (
            ROPES["yarn, context beside it"],
            ["original_max_position_embeddings is 512, the 2048 among the rotary parameters is not used"],
        ),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 2048}, []),
    ],
)
def test_a_contradiction_is_noted(config: dict[str, Any], notes: list[str]) -> None:
    fields = Fields(config, "config.json")
    read_rope_parameters(fields)
    assert fields.notes == notes
