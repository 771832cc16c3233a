"""What generation_config.json asks for besides numbers: read as transformers reads it, or refused in one line."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from llmcli.config.fields import NOT_APPLIED, Fields, GenerationDefaults, read_generation_defaults
from llmcli.errors import CheckpointError

VOCAB_SIZE = 100
EOS = frozenset({1, 30})


def read(values: dict[str, Any]) -> GenerationDefaults:
    return read_generation_defaults(Fields(values, "model/generation_config.json"), EOS, VOCAB_SIZE)


def test_a_file_that_says_nothing_asks_for_nothing() -> None:
    assert read({}) == GenerationDefaults()
    assert read(json.loads(GenerationConfig().to_json_string())) == GenerationDefaults()
    assert (
        read(dict.fromkeys([*NOT_APPLIED, "suppress_tokens", "sequence_bias", "stop_strings"])) == GenerationDefaults()
    )


def test_every_key_means_what_it_means_to_transformers() -> None:
    config = GenerationConfig(
        suppress_tokens=[4, 5],
        begin_suppress_tokens=[6],
        bad_words_ids=[[7], [8, 9], [1], [30], [1, 2]],
        sequence_bias=[[[10, 45], -2.0], [[64], -7.5]],
        forced_eos_token_id=[1, 2],
        stop_strings=["END", "\n\n"],
    )
    defaults = read(json.loads(config.to_json_string()))
    assert defaults.suppress_token_ids == {4, 5}
    assert defaults.begin_suppress_token_ids == {6}
    assert defaults.forced_eos_token_ids == {1, 2}
    assert defaults.stop_strings == ("END", "\n\n")
    scores, history = torch.zeros(1, VOCAB_SIZE), torch.tensor([[3, 8, 10, 1]])
    for length in (1, 2, 3, 4):
        expected = SequenceBiasLogitsProcessor(config.sequence_bias)(history[:, :length], scores)
        expected = NoBadWordsLogitsProcessor(config.bad_words_ids, sorted(EOS))(history[:, :length], expected)
        actual = torch.zeros(VOCAB_SIZE)
        for (*before, token_id), bias in defaults.sequence_bias:
            if before == history[0, length - len(before) : length].tolist():
                actual[token_id] += bias
        torch.testing.assert_close(actual[None], expected)
    assert defaults.shown == {
        "suppress_tokens": "4, 5",
        "begin_suppress_tokens": "6",
        "forced_eos_token_id": "1, 2",
        "bad_words_ids": "(7,), (8, 9), (1,), (30,), (1, 2)",
        "sequence_bias": "((10, 45), -2.0), ((64,), -7.5)",
        "stop_strings": "'END', '\\n\\n'",
    }


def test_transformers_writes_the_dict_form_with_tuples_as_text() -> None:
    config = GenerationConfig(sequence_bias={(10, 45): -2.0, (64,): -7.5})
    written = json.loads(config.to_json_string())
    assert set(written["sequence_bias"]) == {"(10, 45)", "(64,)"}
    assert read(written).sequence_bias == (((10, 45), -2.0), ((64,), -7.5))
    assert read({"sequence_bias": {"64": 1, "5,6": -math.inf}}).sequence_bias == (((64,), 1.0), ((5, 6), -math.inf))


def test_single_values_and_what_names_no_token() -> None:
    assert read({"forced_eos_token_id": 7}).forced_eos_token_ids == {7}
    assert read({"stop_strings": "END"}).stop_strings == ("END",)
    assert read({"suppress_tokens": [-1, 5, 10**50], "begin_suppress_tokens": []}).suppress_token_ids == {5}
    assert read({"sequence_bias": [[[5], 1.0], [[5], 2.0]]}).sequence_bias == (((5,), 2.0),)
    assert read({"bad_words_ids": [], "sequence_bias": []}).sequence_bias == ()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("suppress_tokens", 5, "a list of token ids"),
        ("suppress_tokens", [1.5], "a list of token ids"),
        ("begin_suppress_tokens", [True], "a list of token ids"),
        ("begin_suppress_tokens", "1", "a list of token ids"),
        ("bad_words_ids", [5], "lists of token ids from 0 to 99"),
        ("bad_words_ids", [[]], "lists of token ids from 0 to 99"),
        ("bad_words_ids", [[100]], "lists of token ids from 0 to 99"),
        ("bad_words_ids", {"1": 2}, "lists of token ids from 0 to 99"),
        ("forced_eos_token_id", -1, "token ids from 0 to 99"),
        ("forced_eos_token_id", [10**400], "token ids from 0 to 99"),
        ("stop_strings", [""], "a string or a list of strings, none empty"),
        ("stop_strings", 7, "a string or a list of strings, none empty"),
    ]
    + [
        ("sequence_bias", value, "pairs of a list of token ids from 0 to 99 and a finite number or -inf")
        for value in (
            [[[5], math.nan]], [[[5], math.inf]], [[[5], 10**400]], [[[5], "1"]], [[[5], True]], [[[], 1.0]],
            [[[5]]], [[5, 1.0]], [[[5], 1.0, 2]], [5], {"x": 1.0}, {"()": 1.0}, {"(1, 100)": 1.0}, {"": 1.0},
            {"9" * 50: 1.0}, {"(-1,)": 1.0}, "text",
        )
    ],
)  # fmt: skip
def test_a_malformed_value_is_one_line_with_key_file_and_remedy(key: str, value: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read({key: value})
    text = str(error.value)
    assert text.startswith(f"model/generation_config.json: {key} is ")
    assert text.endswith(f", expected {expected}; correct the file, or take the key out")
    assert len(text) < 250


def test_keys_that_are_not_applied_are_named_where_they_say_something() -> None:
    said = {
        "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "dola_layers": "high",
        "constraints": [1], "force_words_ids": [[5]], "max_time": 10.0, "min_length": 5, "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 2, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4,
        "guidance_scale": 1.5, "forced_bos_token_id": 5, "forced_decoder_ids": [[1, 5]],
        "exponential_decay_length_penalty": [15, 1.6], "watermarking_config": {"bias": 2.5}, "token_healing": True,
    }  # fmt: skip
    assert read(said).not_applied == tuple(NOT_APPLIED) == tuple(said)
    for key, neutral in NOT_APPLIED.items():
        for value in (None, *neutral):
            assert read({key: value}).not_applied == ()


def test_every_key_of_transformers_is_known() -> None:
    """A new version's key must be put into one of these."""
    ours = {
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "min_new_tokens", "do_sample",
        "encoder_repetition_penalty", "max_new_tokens", "eos_token_id", "suppress_tokens", "begin_suppress_tokens",
        "bad_words_ids", "sequence_bias", "forced_eos_token_id", "stop_strings",
    }  # fmt: skip
    without_effect_on_the_text = {
        "max_length", "early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values", "low_memory",
        "use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
        "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
        "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
        "continuous_batching_config", "prefill_chunk_size", "transformers_version",
    }  # fmt: skip
    keys = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
    assert keys - ours - without_effect_on_the_text - set(NOT_APPLIED) == set()
