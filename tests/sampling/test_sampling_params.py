"""Parameters: their ranges, where a run's values come from, and the text of every error."""

import math

import pytest

from llmcli.errors import UsageError
from llmcli.sampling.params import SPECS, SamplingParams, check_param, resolve


def error_text(call, *args, **kwargs):
    with pytest.raises(UsageError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults():
    assert SamplingParams() == SamplingParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.0)


def test_every_parameter_explains_itself():
    assert {name: spec.expected for name, spec in SPECS.items()} == {
        "temperature": "a number >= 0",
        "top_k": "an integer >= 0",
        "top_p": "a number > 0 and <= 1",
        "min_p": "a number >= 0 and < 1",
        "repetition_penalty": "a number > 0",
    }
    for spec in SPECS.values():
        assert spec.help.endswith(".")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 1e9), ("top_k", 0), ("top_k", 10**6), ("top_p", 1), ("top_p", 1e-9),
     ("min_p", 0), ("min_p", 0.999), ("repetition_penalty", 1e-9), ("repetition_penalty", 2)],
)  # fmt: skip
def test_the_edges_of_each_range_are_valid(name, value):
    checked = getattr(SamplingParams(**{name: value}), name)
    assert checked == value
    assert type(checked) is (int if name == "top_k" else float)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_k", 2.0), ("top_p", 0), ("top_p", 1.01), ("min_p", -0.1),
     ("min_p", 1), ("repetition_penalty", 0), ("repetition_penalty", -1)]
    + [(name, bad) for name in SPECS for bad in (math.nan, math.inf, -math.inf, True, "0.5", None, [1])],
)  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    text = error_text(SamplingParams, **{name: value})
    assert text == f"{name} is {value!r}, expected {SPECS[name].expected}"


def test_an_integer_beyond_any_float_is_refused():
    assert error_text(check_param, "temperature", 10**400).startswith("temperature is 1000")


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
            "unknown parameter 'topp' (preset story), "
            "expected one of temperature, top_k, top_p, min_p, repetition_penalty",
        ),
        (
            {"generation_config": {"do_sample": "no"}},
            "do_sample is 'no' (generation_config.json), expected true or false; correct the file",
        ),
    ],
)
def test_resolve_names_the_source_of_a_bad_value(sources, expected):
    arguments = {"flags": {}, "preset": {}, "preset_name": "story", "generation_config": {}} | sources
    assert error_text(resolve, **arguments) == expected


def test_each_value_comes_from_the_first_source_that_names_it():
    resolved = resolve(
        flags={"temperature": 0.1, "top_k": None},
        preset={"temperature": 0.2, "top_k": 20},
        preset_name="story",
        generation_config={"temperature": 0.3, "top_k": 30, "top_p": 0.3},
    )
    assert resolved.params == SamplingParams(temperature=0.1, top_k=20, top_p=0.3)
    assert resolved.sources == {
        "temperature": "flag",
        "top_k": "preset story",
        "top_p": "generation_config.json",
        "min_p": "default",
        "repetition_penalty": "default",
    }


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
