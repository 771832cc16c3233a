"""Parameters: their ranges, where a run's values come from, and the text of every error."""

import math
from dataclasses import asdict

import pytest
from transformers import GenerationConfig

from llmcli.errors import CheckpointError, UsageError
from llmcli.sampling.params import SPECS, SamplingParams, check_param, resolve


def error_text(call, *args, error_class=UsageError, **kwargs):
    with pytest.raises(error_class) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults():
    assert asdict(SamplingParams()) == {
        "temperature": 0.8,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_n_sigma": 0.0,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "mirostat_tau": 0.0,
        "mirostat_eta": 0.1,
        "encoder_repetition_penalty": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "penalty_window": 0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_window": 0,
        "min_new_tokens": 0,
    }


def test_every_parameter_explains_itself():
    assert {name: spec.expected for name, spec in SPECS.items()} == {
        "temperature": "a number >= 0",
        "dynatemp_range": "a number >= 0",
        "dynatemp_exponent": "a number > 0",
        "top_n_sigma": "a number >= 0",
        "top_k": "an integer >= 0",
        "top_p": "a number > 0 and <= 1",
        "min_p": "a number >= 0 and < 1",
        "typical_p": "a number > 0 and <= 1",
        "xtc_probability": "a number >= 0 and <= 1",
        "xtc_threshold": "a number > 0 and <= 0.5",
        "mirostat_tau": "a number >= 0",
        "mirostat_eta": "a number >= 0",
        "encoder_repetition_penalty": "a number > 0",
        "repetition_penalty": "a number > 0",
        "presence_penalty": "a number >= -2 and <= 2",
        "frequency_penalty": "a number >= -2 and <= 2",
        "penalty_window": "an integer >= 0",
        "dry_multiplier": "a number >= 0",
        "dry_base": "a number >= 1",
        "dry_allowed_length": "an integer >= 1",
        "dry_window": "an integer >= 0",
        "min_new_tokens": "an integer >= 0",
    }
    for spec in SPECS.values():
        assert spec.help.endswith(".")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 1e9), ("top_k", 0), ("top_k", 10**6), ("top_p", 1), ("top_p", 1e-9),
     ("min_p", 0), ("min_p", 0.999), ("repetition_penalty", 1e-9), ("repetition_penalty", 2),
     ("typical_p", 1), ("xtc_probability", 1), ("xtc_threshold", 0.5), ("presence_penalty", -2),
     ("frequency_penalty", 2), ("penalty_window", 0), ("dry_multiplier", 0), ("dry_base", 1),
     ("dry_allowed_length", 1), ("dry_window", 0), ("min_new_tokens", 0), ("dynatemp_range", 0),
     ("dynatemp_exponent", 1e-9), ("top_n_sigma", 0), ("mirostat_tau", 0), ("mirostat_eta", 0),
     ("encoder_repetition_penalty", 0.1)],
)  # fmt: skip
def test_the_edges_of_each_range_are_valid(name, value):
    checked = getattr(SamplingParams(**{name: value}), name)
    assert checked == value
    integers = {"top_k", "penalty_window", "dry_allowed_length", "dry_window", "min_new_tokens"}
    assert type(checked) is (int if name in integers else float)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_k", 2.0), ("top_p", 0), ("top_p", 1.01), ("min_p", -0.1),
     ("min_p", 1), ("repetition_penalty", 0), ("repetition_penalty", -1), ("typical_p", 0), ("typical_p", 1.01),
     ("xtc_probability", 1.01), ("xtc_threshold", 0), ("xtc_threshold", 0.51), ("presence_penalty", -2.01),
     ("presence_penalty", 2.01), ("frequency_penalty", -2.01), ("frequency_penalty", 2.01), ("penalty_window", -1),
     ("dry_multiplier", -0.1), ("dry_base", 0.99), ("dry_allowed_length", 0), ("dry_window", -1),
     ("min_new_tokens", -1), ("dynatemp_range", -0.1), ("dynatemp_exponent", 0), ("top_n_sigma", -1),
     ("mirostat_tau", -1), ("mirostat_eta", -0.1), ("encoder_repetition_penalty", 0)]
    + [(name, bad) for name in SPECS for bad in (math.nan, math.inf, -math.inf, True, "0.5", None, [1])],
)  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    text = error_text(SamplingParams, **{name: value})
    assert text == f"{name} is {value!r}, expected {SPECS[name].expected}"


def test_an_integer_beyond_any_float_is_refused():
    message = "temperature is an integer of 1329 bits, expected a number >= 0"
    assert error_text(check_param, "temperature", 10**400) == message


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"flags": {"top_p": 1.5}}, "top_p is 1.5 (flag), expected a number > 0 and <= 1"),
        (
            {"preset": {"top_k": "many"}},
            "top_k is 'many' (preset story), expected an integer >= 0; override it with --top-k",
        ),
        (
            {"generation_config": {"repetition_penalty": -1}},
            "repetition_penalty is -1 (generation_config.json), expected a number > 0; "
            "override it with --repetition-penalty",
        ),
        (
            {"preset": {"topp": 0.5}},
            "unknown parameter 'topp' (preset story), expected one of " + ", ".join(SPECS),
        ),
        (
            {"generation_config": {"do_sample": "no"}},
            "do_sample is 'no' (generation_config.json), expected true or false; correct the file",
        ),
    ],
)
def test_resolve_names_the_source_of_a_bad_value(sources, expected):
    """A bad value is a CheckpointError in the model's file, and a UsageError elsewhere."""
    arguments = {"flags": {}, "preset": {}, "preset_name": "story", "generation_config": {}} | sources
    error_class = CheckpointError if "generation_config" in sources else UsageError
    assert error_text(resolve, **arguments, error_class=error_class) == expected


def test_each_value_comes_from_the_first_source_that_names_it():
    resolved = resolve(
        flags={"temperature": 0.1, "top_k": None, "dry_multiplier": 0.8},
        preset={"temperature": 0.2, "top_k": 20, "xtc_probability": 0.5},
        preset_name="story",
        generation_config={"temperature": 0.3, "top_k": 30, "top_p": 0.3, "typical_p": 0.9, "min_new_tokens": 4},
    )
    assert resolved.params == SamplingParams(
        temperature=0.1, top_k=20, top_p=0.3, typical_p=0.9, xtc_probability=0.5, dry_multiplier=0.8, min_new_tokens=4
    )
    assert resolved.sources == dict.fromkeys(SPECS, "default") | {
        "temperature": "flag",
        "dry_multiplier": "flag",
        "top_k": "preset story",
        "xtc_probability": "preset story",
        "top_p": "generation_config.json",
        "typical_p": "generation_config.json",
        "min_new_tokens": "generation_config.json",
    }


def test_all_names_that_transformers_shares_are_read_as_it_writes_them():
    config = GenerationConfig(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, typical_p=0.7, repetition_penalty=1.2, min_new_tokens=3,
        encoder_repetition_penalty=1.3,
    ).to_dict()  # fmt: skip
    resolved = resolve({}, {}, "", config | {"do_sample": True})
    shared = {
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "min_new_tokens",
        "encoder_repetition_penalty",
    }  # fmt: skip
    assert shared == SPECS.keys() & config.keys()
    assert {name for name, source in resolved.sources.items() if source != "default"} == shared
    assert all(getattr(resolved.params, name) == config[name] for name in shared)


def test_zero_is_a_value_and_not_an_absence():
    resolved = resolve({"temperature": 0, "top_k": 0}, {"top_k": 5}, "story", {"temperature": 0.7})
    assert (resolved.params.temperature, resolved.params.top_k) == (0, 0)


def test_a_flag_overrides_a_bad_file():
    resolved = resolve({"top_p": 0.5}, {"top_p": 7}, "story", {"top_p": -7})
    assert resolved.params.top_p == 0.5


def test_a_model_without_sampling_values_gets_our_defaults_and_not_those_of_transformers():
    resolved = resolve({}, {}, "", {"eos_token_id": [1, 2], "temperature": None, "max_length": 4096})
    assert resolved.params == SamplingParams()
    assert set(resolved.sources.values()) == {"default"}


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": None}])
def test_values_count_unless_the_model_forbids_sampling(do_sample):
    resolved = resolve({}, {}, "", {"temperature": 0.6, "top_p": 0.9} | do_sample)
    assert resolved.params == SamplingParams(temperature=0.6, top_p=0.9)


def test_a_model_that_forbids_sampling_is_greedy():
    config = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    resolved = resolve({}, {}, "", config)
    assert resolved.params.temperature == 0
    assert resolved.sources["temperature"] == "generation_config.json, do_sample false"
    assert resolve({"temperature": 0.5}, {}, "", config).params.temperature == 0.5
    assert resolve({}, {"temperature": 0.4}, "story", config).params.temperature == 0.4
