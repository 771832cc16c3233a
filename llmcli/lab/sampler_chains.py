"""Sampler chains, and logits and prompts on which all of their filters act."""

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np

from llmcli.sampling.params import SPECS, Sampler, SamplingParams

NUM_PROMPT_TOKENS = 40
OFF = {"top_p": 1.0, "temperature": 1.0}
# Texts of low ids continue these: the same last id several times, one bias alone, one that reaches far back.
SEQUENCES = (
    ((1, 2), 3.0), ((2,), -0.5), ((4, 1, 2), -1.25), ((0, 3), -np.inf), ((3, 5, 0), 0.1), ((5, 0), 0.2),
    ((2, 5, 0), 0.7), ((1, 1, 4), 2.5), ((1, 4), -np.inf), (tuple([3] * 100), 4.0), ((10**9, 1), 9.0),
    ((1, 10**9), 9.0),
)  # fmt: skip
BACKWARDS = ("xtc", "typical_p", "min_p", "top_p", "top_k", "top_n_sigma", "temperature", "mirostat")
# Forced ids are many, since some of the logits are -inf for half of the tokens.
EVERY_STEP = {
    "temperature": 1.3, "dynatemp_range": 0.5, "dynatemp_exponent": 0.7, "top_n_sigma": 6.0, "top_k": 300,
    "top_p": 0.98, "min_p": 0.0005, "typical_p": 0.93, "xtc_probability": 0.4, "xtc_threshold": 0.03,
    "mirostat_tau": 2.5, "encoder_repetition_penalty": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.4,
    "frequency_penalty": 0.3, "penalty_window": 90, "dry_multiplier": 0.8, "dry_window": 200, "min_new_tokens": 200,
    "eos_token_ids": frozenset({3, 5}), "dry_breaker_token_ids": frozenset({2, 7}),
    "logit_bias": {8: 1.0, 11: -1.5, 13: -np.inf, 10**9: 2.0}, "sequence_bias": SEQUENCES,
    "begin_suppress_token_ids": frozenset({1, 4}), "forced_eos_token_ids": frozenset(range(2, 15)),
    "forced_eos_position": 70,
}  # fmt: skip

# Settings besides OFF, by the chain's name: parameters and fields of Sampler.
CHAINS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {
        "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "dry_multiplier": 0.8, "logit_bias": {1: 2.0, 4: -np.inf}, "eos_token_ids": frozenset({0, 9}),
        "ignore_eos": True,
    },
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "default": {"temperature": 0.8, "top_p": 0.95},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_k of many": {"temperature": 1.5, "top_k": 700},
    "top_p near 1": {"temperature": 2.0, "top_p": 0.9999},
    "min_p": {"min_p": 0.02},
    "typical_p": {"temperature": 0.9, "typical_p": 0.7},
    "xtc": {"temperature": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.05, "eos_token_ids": frozenset({1, 6})},
    "typical_p and xtc": {"typical_p": 0.5, "xtc_probability": 0.7, "xtc_threshold": 0.001},
    "penalties": {
        "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "presence_penalty": -0.4,
        "frequency_penalty": 0.1, "penalty_window": 64,
    },
    "dry": {
        "temperature": 0.5, "dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_window": 12,
        "dry_breaker_token_ids": frozenset({0}),
    },
    "top_n_sigma": {"temperature": 0.8, "top_n_sigma": 1.5},
    "dynamic temperature": {"temperature": 0.9, "dynatemp_range": 0.6, "dynatemp_exponent": 1.7, "top_p": 0.97},
    "dynamic temperature from 0": {"temperature": 0.4, "dynatemp_range": 1.0, "top_n_sigma": 2.0},
    "mirostat": {"temperature": 0.8, "mirostat_tau": 3.0},
    "fast mirostat": {"temperature": 1.4, "top_k": 200, "mirostat_tau": 5.0, "mirostat_eta": 0.7},
    "mirostat and xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "mirostat_tau": 2.0, "mirostat_eta": 1.0},
    "sequences": {"temperature": 0.6, "sequence_bias": SEQUENCES, "encoder_repetition_penalty": 1.4},
    "greedy with sequences": {
        "temperature": 0, "sequence_bias": SEQUENCES, "encoder_repetition_penalty": 0.7, "repetition_penalty": 1.1,
        "begin_suppress_token_ids": frozenset({2, 3}), "forced_eos_token_ids": frozenset(range(3, 15)),
        "forced_eos_position": NUM_PROMPT_TOKENS + 3, "mirostat_tau": 2.0,
    },
    "begin and end": {
        "temperature": 0.7, "begin_suppress_token_ids": frozenset(range(12)), "repetition_penalty": 1.3,
        "forced_eos_token_ids": frozenset({*range(12), 10**9}), "forced_eos_position": NUM_PROMPT_TOKENS + 5,
        "eos_token_ids": frozenset({0}), "ignore_eos": True,
    },
    "temperature last": {
        "temperature": 1.6, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9,
        "order": ("top_k", "typical_p", "top_p", "min_p", "temperature"),
    },
    "temperature in the middle": {
        "temperature": 0.6, "dynatemp_range": 0.3, "top_n_sigma": 2.5, "typical_p": 0.8, "min_p": 0.02, "top_p": 0.9,
        "order": ("typical_p", "top_n_sigma", "temperature", "top_p", "min_p"),
    },
    "no temperature": {"top_p": 0.8, "typical_p": 0.9, "order": ("typical_p", "top_p")},
    "xtc first": {
        "temperature": 0.9, "xtc_probability": 0.7, "xtc_threshold": 0.02, "top_k": 40, "top_p": 0.9,
        "mirostat_tau": 3.0, "order": ("xtc", "top_p", "temperature", "top_k", "mirostat"),
    },
    "every step": EVERY_STEP,
    "every step backwards": EVERY_STEP | {"order": BACKWARDS},
}  # fmt: skip


def make_sampler(settings: Mapping[str, Any], seed: int, sample_index: int = 0) -> Sampler:
    """A sampler with everything off except the named parameters and fields."""
    settings = {"num_prompt_tokens": NUM_PROMPT_TOKENS} | dict(settings)
    params = {name: value for name, value in settings.items() if name in SPECS}
    others = {name: value for name, value in settings.items() if name not in SPECS}
    return Sampler(SamplingParams(**(OFF | params)), seed=seed, sample_index=sample_index, **others)


def make_logits(num_rows: int, vocab_size: int, seed: int) -> np.ndarray:
    """Rows of many kinds: a few likely tokens over a tail, flat, coarse (with ties), masked, far apart.

    Some low ids are likely, so that ends, breakers and biases play a part, and texts repeat themselves.
    Shapes: result [num_rows, vocab_size] float32
    """
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, vocab_size)) * 2.5
    for row, values in enumerate(logits):
        values[rng.integers(0, vocab_size, 12)] += rng.uniform(2, 11, 12)
        values[rng.integers(0, min(vocab_size, 16), 6)] += rng.uniform(5, 12, 6)
        kind = row % 6
        if kind == 1:
            values *= 0.2
        if kind == 2:
            values[:] = np.round(values * 4) / 4
        if kind == 3:
            values[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
        if kind == 4:
            values *= 6
    return logits.astype(np.float32)


def make_prompts(num_rows: int, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Prompts that repeat themselves, [NUM_PROMPT_TOKENS] int32 each."""
    rngs = map(np.random.default_rng, zip(repeat(seed), range(num_rows)))
    return [rng.integers(0, min(vocab_size, 6), NUM_PROMPT_TOKENS).astype(np.int32) for rng in rngs]


# Fields with which a chain may leave no token of a small vocabulary.
_BANS = {"eos_token_ids", "logit_bias", "sequence_bias", "begin_suppress_token_ids", "forced_eos_token_ids"}


def chains_for(vocab_size: int) -> list[Mapping[str, Any]]:
    """The chains that leave a token of any logits of this vocabulary."""
    return [settings for settings in CHAINS.values() if vocab_size > 16 or not _BANS & settings.keys()]
