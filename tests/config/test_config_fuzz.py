"""Any config.json is read or refused with a message: no other exception, no number out of range."""

from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest

from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError

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
        "model_type": rng.choice(["llama", "mistral", "qwen2", "qwen3", "smollm3"]),
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
