"""What `LlamaConfig` reads and what it refuses."""

from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
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
            "model_type 'gpt2' is not supported, expected one of: cwm, internlm3, llama, ministral, mistral, qwen2, "
            "qwen3, seed_oss, smollm3",
        ),
        ({"model_type": None}, "model_type null is not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures .*SequenceClassification.* not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, expected 'silu'"),
        ({"is_causal": False}, "is_causal other than true is not supported"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer type sliding_attention is not supported for llama",
        ),
        ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
        ({"architectures": [{"a": 1}, []]}, "architectures .* is not supported"),
        ({"architectures": ["x" * 10_000]}, r"architectures .{80} is not supported"),
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
        ({"eos_token_id": [1, 2**31]}, "eos_token_id is .*expected a token id or a list"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, expected at most 2147483647"),
        ({"hidden_size": 10**80}, "hidden_size is 10+[.]{3}, expected at most 16777216"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001, expected at most 10000"),
        ({"head_dim": 2**22, "num_attention_heads": 8}, r"num_attention_heads 8 \* head_dim 4194304 is over 16777216"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps is 1e-320, expected a number from 1e-15 to 1e.15"),
        ({"rms_norm_eps": 1e30}, "rms_norm_eps is 1e.30, expected a number from"),
        ({"unknown": 10**400}, "config.json: an integer has more than 100 digits"),
        ({"unknown": "\ud800"}, "config.json: unknown has the lone surrogate U\\+D800"),
    ],
)
def test_impossible_values_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**overrides)


DERIVED = {
    "num_key_value_heads": ("llama", "qwen2", "qwen3", "smollm3", "seed_oss", "internlm3"),
    "head_dim": ("llama", "mistral", "ministral", "seed_oss", "internlm3"),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "ministral", "cwm", "seed_oss", "internlm3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", DERIVED)
def test_null_is_derived_where_transformers_derives_it(family: str, key: str) -> None:
    """Not the family's default: qwen2 has 32 key-value heads where the key is missing, and all heads for null."""
    config = {**CONFIG, "model_type": family, "architectures": None, key: None}
    if family in DERIVED[key]:
        assert getattr(LlamaConfig.from_dict(config, "config.json"), key) == 8  # heads, and 64 / heads
    else:
        with pytest.raises(CheckpointError, match=f"{key} is null, expected a positive integer"):
            LlamaConfig.from_dict(config, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act", "max_position_embeddings", "hidden_size"]
)
def test_null_is_refused_where_transformers_refuses_it(family: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is null, expected"):
        LlamaConfig.from_dict({**CONFIG, "model_type": family, "architectures": None, key: None}, "config.json")


def test_null_is_not_causal_in_transformers() -> None:
    with pytest.raises(UnsupportedModelError, match="is_causal other than true is not supported"):
        LlamaConfig.from_dict({**CONFIG, "is_causal": None}, "config.json")


WINDOWED, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("qwen2", {"max_window_layers": 0}, (None, None, None)),
        ("qwen2", {"max_window_layers": 0, "use_sliding_window": True}, (9, 9, 9)),
        ("qwen3", {"max_window_layers": -1, "use_sliding_window": True}, (9, 9, 9)),
        ("qwen3", {"max_window_layers": 2, "use_sliding_window": True}, (None, None, 9)),
        ("qwen2", {"layer_types": [WINDOWED, FULL, FULL], "use_sliding_window": True}, (9, None, None)),
        ("mistral", {}, (9, 9, 9)),
        ("ministral", {"layer_types": [FULL, WINDOWED, FULL]}, (None, 9, None)),
        ("cwm", {}, (None, 9, 9)),
        ("cwm", {"layer_types": [WINDOWED, FULL, FULL]}, (9, None, None)),
        ("mistral", {"layer_types": [FULL, WINDOWED, FULL]}, (None, 9, None)),
        ("mistral", {"layer_types": None}, (9, 9, 9)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [0, 7, -1, 0]}, (9, None, None)),
        ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": -2}, (None, 9, None)),
        ("smollm3", {"use_sliding_window": False, "no_rope_layer_interval": -2}, (None, None, None)),
    ],
)
def test_windows(family: str, settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = {**CONFIG, "model_type": family, "architectures": None, "sliding_window": 9, **settings}
    read = LlamaConfig.from_dict(config, "config.json")
    assert read.traits.sliding_windows == windows
    assert read.notes == ()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", {"layer_types": [WINDOWED] * 3}, "layer_types has sliding_attention, but use_sliding_window is not"),
        ("qwen3", {"layer_types": [FULL] * 2}, "layer_types has 2 entries, expected 3"),
        ("qwen3", {"layer_types": [FULL, 3, FULL]}, "layer_types is .* expected a list of strings"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers is null, expected an integer"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"layer_types": [WINDOWED] * 3, "sliding_window": None}, "but there is no sliding_window"),
        ("smollm3", {"layer_types": [WINDOWED] * 3, "sliding_window": None}, "but there is no sliding_window"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected another number than 0"),
        ("smollm3", {"no_rope_layers": [True, False, True]}, "no_rope_layers is .* expected a list of integers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, expected 3"),
    ],
)
def test_impossible_layers_are_named(family: str, settings: dict[str, Any], message: str) -> None:
    config = {**CONFIG, "model_type": family, "architectures": None, "sliding_window": 9, **settings}
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.from_dict(config, "config.json")


def test_windows_that_contradict_each_other_are_noted() -> None:
    """Applied as in transformers, whose masks follow layer_types alone; the logits are compared with the others."""
    settings = {"use_sliding_window": False, "sliding_window": 9, "layer_types": [WINDOWED, FULL, WINDOWED]}
    config = LlamaConfig.from_dict({**CONFIG, "model_type": "smollm3", "architectures": None, **settings}, "c")
    assert config.traits.sliding_windows == (9, None, 9)
    assert config.notes == ("use_sliding_window is false, but layer_types has sliding windows: they are used",)


# Any config.json is read or refused with a message: no other exception, no number out of range.


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**24, 2**31, 2**31 - 1, 2**53 + 1, 2**63, 2**64, -(2**63), 10**20),
    *(10**99, 10**400, -(10**400), 10**5000, 0.0, -0.0, 0.5, 1.0, 1e-15, 1e-45, 1e-320, 5e-324, 1e15, 1e30, -1e30),
    *(1e39, 1e308, float("inf"), float("-inf"), float("nan"), 1.0000000000000002, "", "64", "\ud800", "x" * 100_000),
    *([], [None], [1], [True], [[1]], [10**400], [1e30], ["full_attention"], ["sliding_attention"] * 4, [{}], [1] * 3),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": []}, {"factor": 10**400}, {"full_attention": {}}, [0.5, -1]),
]
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None, "truncate": True, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"type": "linear", "factor": 2.0}


def base_config(rng: Random) -> dict[str, Any]:
    return {
        "model_type": rng.choice(FAMILIES),
        "architectures": None,
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        rng.choice(["rope_scaling", "rope_parameters"]): dict(rng.choice([YARN, LLAMA3, LINEAR])),
        "partial_rotary_factor": 1.0,
        "is_causal": True,
        "per_layer_config": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": 8,
        "use_sliding_window": rng.random() < 0.5,
        "max_window_layers": 1,
        "layer_types": ["full_attention"] * 3,
        "no_rope_layers": [1, 0, 1],
        "no_rope_layer_interval": 2,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
    }


def mutate(config: dict[str, Any], rng: Random) -> None:
    key = rng.choice(list(config))
    value = config[key]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        value[rng.choice(list(value))] = deepcopy(rng.choice(NASTY))
    elif isinstance(value, list) and value and rng.random() < 0.5:
        value[rng.randrange(len(value))] = deepcopy(rng.choice(NASTY))
    elif rng.random() < 0.1:
        del config[key]
    else:
        config[key] = deepcopy(rng.choice(NASTY))


def test_a_damaged_config_is_read_or_refused() -> None:
    num_read = 0
    for number in range(3000):
        rng = Random(number)
        config = base_config(rng)
        for _ in range(rng.randint(1, 3)):
            mutate(config, rng)
        try:
            read = LlamaConfig.from_dict(config, "config.json")
        except CheckpointError as error:
            message = str(error)
            assert message.startswith("config.json: ")
            assert len(message) < 500
            assert "\n" not in message
            continue
        num_read += 1
        assert read.head_dim * read.num_attention_heads <= 2**24
        with np.errstate(all="raise", under="ignore"):
            frequencies = read.rope.inverse_frequencies(min(read.head_dim, 4096))
        assert np.isfinite(frequencies).all()
    assert 300 < num_read < 2700


@pytest.mark.parametrize("value", [DEEP, [{"a": DEEP}]])
def test_a_deep_value_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: nested more than \d+ levels deep"):
        LlamaConfig.from_dict({**base_config(Random(0)), "unknown": value}, "config.json")
