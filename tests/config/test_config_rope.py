"""Inverse frequencies against transformers, and the angles they give far beyond the original context."""

from typing import Any

import numpy as np
import pytest

from llmcli.config.fields import Fields
from llmcli.config.rope import RopeParameters, read_rope_parameters
from llmcli.errors import CheckpointError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
}


def read(config: dict[str, Any]) -> RopeParameters:
    return read_rope_parameters(Fields(config, "config.json"))


@pytest.mark.parametrize("head_dim", [8, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_equal_transformers(name: str, head_dim: int) -> None:
    config = {"max_position_embeddings": 131072, **ROPES[name]}
    hf_config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **config)
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_config).inv_freq.numpy()
    ours = read(config).inverse_frequencies(head_dim)
    assert ours.dtype == np.float32
    assert ours.shape == (head_dim // 2,)
    # The last bit may differ in one of hundreds of places, where the two libraries round a power differently; the
    # interpolation of llama3 can make a few bits of it.
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


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "mrope", "su"])
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
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ],
)
def test_impossible_rotary_parameters_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)
