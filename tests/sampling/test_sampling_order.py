"""`Sampler.order`: the effect of an order on the draws, and which orders are refused."""

import numpy as np
import pytest
from sampling_references import make_logits, make_sampler, reference_scores, survivors_of
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmcli.errors import UsageError
from llmcli.sampling import chain
from llmcli.sampling.chain import choose, run_steps
from llmcli.sampling.params import DEFAULT_ORDER, OFF_VALUES, SPECS, Sampler, SamplingParams

LLAMA_CPP = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")


def num_left(logits, **settings):
    *_, (_, candidates) = run_steps(logits, [], make_sampler(**settings))
    return len(candidates.token_ids)


def test_the_usual_order_is_that_of_the_declared_filters():
    assert tuple(step.name for step in chain.FILTERS) == DEFAULT_ORDER == Sampler(SamplingParams(), 0).order
    for values in OFF_VALUES.values():
        assert values.keys() <= SPECS.keys()


def test_with_the_temperature_last_it_does_not_move_what_top_p_keeps():
    logits = (-2.8 * np.log(np.arange(200) + 5)).astype(np.float32)
    for temperature, kept in ((0.5, 3), (1.0, 12), (1.5, 42)):
        assert num_left(logits, temperature=temperature, top_p=0.9) == kept
        assert num_left(logits, temperature=temperature, top_p=0.9, order=("top_p", "temperature")) == 12


@pytest.mark.parametrize(
    "order", [("temperature", "top_k", "top_p", "min_p"), ("min_p", "top_p", "temperature", "top_k")]
)
def test_steps_run_in_the_order_they_are_named_in(order):
    logits = make_logits("normal", 1000)
    settings = {"temperature": 1.7, "top_k": 90, "top_p": 0.9, "min_p": 0.03}
    warpers = {
        "temperature": TemperatureLogitsWarper(1.7), "top_k": TopKLogitsWarper(90), "top_p": TopPLogitsWarper(0.9),
        "min_p": MinPLogitsWarper(0.03),
    }  # fmt: skip
    expected = logits.astype(np.float64)
    for name in order:
        expected = reference_scores(warpers[name], expected)
    steps = list(run_steps(logits, [], make_sampler(**settings, order=order)))
    assert [name for name, _ in steps[1 + len(chain.PENALTIES) :]] == list(order)
    np.testing.assert_array_equal(steps[-1][1].token_ids, survivors_of(expected))


def test_the_order_changes_nothing_where_temperature_and_filters_are_off_or_the_draw_is_greedy():
    logits = make_logits("normal", 300)
    for settings in ({}, {"temperature": 0, "top_k": 5}):
        for seed in range(20):
            tokens = {
                choose(logits, [1], make_sampler(**settings, order=order, seed=seed)).token_id
                for order in (DEFAULT_ORDER, LLAMA_CPP)
            }
            assert len(tokens) == 1


@pytest.mark.parametrize(
    ("settings", "order", "expected"),
    [
        ({}, ("temperature", "topp"), "the sampler order names 'topp', expected some of " + ", ".join(DEFAULT_ORDER)),
        ({}, ("top_k", "temperature", "top_k"), "the sampler order names top_k 2 times, expected once"),
        ({}, ("mirostat", "top_k"), "the sampler order has mirostat before top_k, expected it at the end"),
        (
            {"top_p": 0.9},
            ("temperature", "top_k"),
            "the sampler order leaves out top_p, but top_p is 0.9; name it too, or set top_p to 1.0",
        ),
        (
            {"dynatemp_range": 0.5},
            ("top_k",),
            "the sampler order leaves out temperature, but dynatemp_range is 0.5; "
            "name it too, or set dynatemp_range to 0.0",
        ),
        (
            {"mirostat_tau": 5},
            LLAMA_CPP,
            "the sampler order leaves out mirostat, but mirostat_tau is 5.0; name it too, or set mirostat_tau to 0.0",
        ),
    ],
)  # fmt: skip
def test_orders_that_are_refused(settings, order, expected):
    with pytest.raises(UsageError) as error:
        make_sampler(**settings, order=order)
    assert str(error.value) == expected


@pytest.mark.parametrize("step", OFF_VALUES)
def test_a_step_that_is_left_out_must_be_off(step):
    on = {"temperature": 0.9, "top_n_sigma": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5,
          "xtc_probability": 0.5, "mirostat_tau": 5}  # fmt: skip
    order = tuple(name for name in DEFAULT_ORDER if name != step)
    make_sampler(order=order)
    settings = {name: on[name] for name in OFF_VALUES[step] if name in on}
    with pytest.raises(UsageError, match=f"leaves out {step}"):
        make_sampler(**settings, order=order)
    make_sampler(**(settings | {"temperature": 0}), order=order)  # greedy: no filter runs
