"""What `LlamaConfig` reads and what it refuses."""

from typing import Any

import pytest
from tiny_models import CONFIG

from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError, UnsupportedModelError


def read(**overrides: Any) -> LlamaConfig:
    config = {key: value for key, value in {**CONFIG, **overrides}.items() if value is not None}
    return LlamaConfig.from_dict(config, "config.json")


def test_reads_hugging_face_names() -> None:
    config = read()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 3, 288)
    assert config.head_dim == 64 // 8
    assert config.q_size == 64
    assert config.kv_size == 16
    assert config.eos_token_ids == (257,)
    # 2 (K and V) * 3 layers * 16 * 10 tokens * 2 bytes
    assert config.kv_cache_bytes(10, 2) == 1920


def test_defaults_are_those_of_hugging_face() -> None:
    keys = ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "hidden_act", "architectures")
    config = read(**dict.fromkeys(keys))
    assert config.num_key_value_heads == 8
    assert config.rms_norm_eps == 1e-6
    assert config.tie_word_embeddings is False
    assert config.rope.rope_theta == 10000.0


def test_several_end_tokens() -> None:
    assert read(eos_token_id=[1, 2, 3]).eos_token_ids == (1, 2, 3)
    assert read(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported, expected one of: llama, mistral, qwen2, qwen3, smollm3",
        ),
        ({"model_type": None}, "model_type null is not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures .*SequenceClassification.* not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, expected 'silu'"),
    ],
)
def test_other_architectures_are_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": None}, "config.json: hidden_size is missing, expected a positive integer"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id is .*expected a token id or a list"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_impossible_values_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**overrides)
