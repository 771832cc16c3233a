"""Tiny models of every family and shape that runners must compute, as overrides of `tiny_models.CONFIG`."""

from typing import Any

from tiny_models import NULL

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 8},
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "own head_dim": {"head_dim": 24},
    "wide heads": {"head_dim": 40, "num_attention_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rotary": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rotary": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
    "yarn rotary": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "mistral without a window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": NULL,
    },
    "ministral": {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "cwm": {
        "model_type": "cwm",
        "architectures": ["CwmForCausalLM"],
        "head_dim": 8,
        "sliding_window": 16,
        "rope_scaling": LLAMA3,
    },
    "seed_oss": {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "head_dim": 24},
    "internlm3": {
        "model_type": "internlm3",
        "architectures": ["InternLM3ForCausalLM"],
        "head_dim": 8,
        "qkv_bias": True,
        "bias": True,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen2 with windows": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "qwen3 with layer types": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0, 1],
        "num_hidden_layers": 3,
        "pad_token_id": 0,
    },
    "smollm3 with windows": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 16,
        "pad_token_id": 0,
    },
    "smollm3 with windows not used": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": 0,
    },
    "mistral with layer types": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "one layer, odd sizes": {"num_hidden_layers": 1, "intermediate_size": 83, "vocab_size": 301},
}
