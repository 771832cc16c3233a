"""The steps one after the other, against transformers' processors in the same order, and properties of all steps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_references import every_row, make_logits, make_sampler, reference_scores, survivors_of
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llmcli.sampling import chain
from llmcli.sampling.candidates import Candidates, gather_candidates
from llmcli.sampling.chain import run_steps
from llmcli.sampling.params import DEFAULT_ORDER, Sampler, SamplingParams

UP_TO_DRY = [
    "logits", "logit_bias", "sequence_bias", "begin_suppress", "eos_ban", "encoder_repetition_penalty",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry",
]  # fmt: skip


@every_row
def test_the_steps_of_transformers_in_its_order(logits):
    sampler = make_sampler(
        temperature=0.7, top_k=45, top_p=0.9, min_p=0.02, typical_p=0.8, repetition_penalty=1.2, min_new_tokens=9,
        num_prompt_tokens=22, eos_token_ids=frozenset({1, 30}), logit_bias={5: 2.0, 6: -2.0, 7: -np.inf},
        encoder_repetition_penalty=1.6, sequence_bias=(((4, 9, 10), -3.0), ((9, 10), -1.0), ((9, 11), -np.inf)),
    )  # fmt: skip
    history = np.append(np.random.default_rng(2).integers(0, len(logits), 28), [4, 9])
    expected = logits.astype(np.float64)
    for processor in (
        SequenceBiasLogitsProcessor({(5,): 2.0, (6,): -2.0, (7,): -np.inf, (4, 9, 10): -3.0, (9, 10): -1.0}),
        EncoderRepetitionPenaltyLogitsProcessor(1.6, torch.from_numpy(history[None, :22])),
        RepetitionPenaltyLogitsProcessor(1.2),
        NoBadWordsLogitsProcessor([[9, 11], [1]], [1, 30]),
        MinNewTokensLengthLogitsProcessor(22, 9, [1, 30]),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(45),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
        TypicalLogitsWarper(0.8),
    ):
        expected = reference_scores(processor, expected, history)
    steps = list(run_steps(logits, history, sampler))
    names = [*UP_TO_DRY, "temperature", "top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "xtc", "mirostat"]
    assert [name for name, _ in steps] == names
    scores = np.sort(steps[-1][1].scores)
    expected = np.sort(expected[survivors_of(expected)])
    # Only differences of scores matter, and the likeliest token need not be typical.
    np.testing.assert_allclose(scores - scores[-1], expected - expected[-1], rtol=1e-12, atol=1e-12)


def test_greedy_takes_no_filters():
    sampler = make_sampler(temperature=0, top_k=1, typical_p=0.1, xtc_probability=1)
    steps = list(run_steps(make_logits("normal", 50), [1], sampler))
    assert [name for name, _ in steps] == UP_TO_DRY
    assert len(steps[-1][1].token_ids) == 50


def test_a_step_that_is_off_changes_nothing():
    candidates = gather_candidates(make_logits("normal", 50), 0)
    sampler = make_sampler(
        eos_token_ids=frozenset({3}), dry_breaker_token_ids=frozenset({4}), begin_suppress_token_ids=frozenset({5}),
        sequence_bias=(((7, 5), 1.0),),
    )  # fmt: skip
    for step in chain.PENALTIES + chain.FILTERS:
        if step.name != "temperature":
            assert step.apply(candidates, sampler, [1, 2, 1]) is candidates


sequences = st.tuples(
    st.tuples(st.integers(0, 5), st.integers(1, 5)) | st.tuples(st.integers(1, 5)),
    st.floats(max_value=1e308, allow_nan=False),
)


@st.composite
def any_sampler(draw):
    """Any sampler that leaves token 0 to choose."""
    switched = {
        "top_k": st.integers(0, 70),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1, exclude_max=True),
        "typical_p": st.floats(0, 1, exclude_min=True),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0, 0.5, exclude_min=True),
        "repetition_penalty": st.floats(0, exclude_min=True, max_value=1e300),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "penalty_window": st.integers(0, 8),
        "dry_multiplier": st.floats(0, 1e300),
        "dry_base": st.floats(1, 1e300),
        "dry_allowed_length": st.integers(1, 3),
        "dry_window": st.integers(0, 8),
        "min_new_tokens": st.integers(0, 8),
        "encoder_repetition_penalty": st.floats(0, exclude_min=True, max_value=1e308),
        "dynatemp_range": st.floats(0, 1e308),
        "dynatemp_exponent": st.floats(0, 1e308, exclude_min=True),
        "top_n_sigma": st.floats(0, 1e308),
        "mirostat_tau": st.floats(0, 1e308),
        "mirostat_eta": st.floats(0, 1e308),
    }
    params = draw(st.fixed_dictionaries({"temperature": st.floats(0, 1e300)}, optional=switched))
    return Sampler(
        SamplingParams(**params),
        seed=draw(st.integers(0, 2**64 - 1)),
        num_prompt_tokens=draw(st.integers(0, 5)),
        eos_token_ids=draw(st.frozensets(st.integers(1, 5), max_size=2)),
        ignore_eos=draw(st.booleans()),
        logit_bias=draw(st.dictionaries(st.integers(1, 5), st.floats(max_value=1e308, allow_nan=False), max_size=3)),
        dry_breaker_token_ids=draw(st.frozensets(st.integers(0, 5), max_size=2)),
        begin_suppress_token_ids=draw(st.frozensets(st.integers(1, 5), max_size=2)),
        sequence_bias=tuple(draw(st.lists(sequences, max_size=4))),
        order=(*draw(st.permutations(DEFAULT_ORDER[:-1])), "mirostat"),
        mirostat_mu=draw(st.none() | st.floats(-1e300, 1e300)),
    )


histories = st.lists(st.integers(0, 5), max_size=12)
finite_rows = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-3, 3), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=60)
@given(row=finite_rows, history=histories, sampler=any_sampler())
def test_at_least_one_token_survives_and_each_step_only_removes(row, history, sampler):
    previous = set(range(len(row)))
    for _, candidates in run_steps(np.asarray(row, np.float32), history, sampler):
        token_ids, scores = candidates
        assert 1 <= len(token_ids) == len(scores)
        assert set(token_ids) <= previous
        assert scores.max() > -np.inf
        assert not np.isnan(scores).any()
        previous = set(token_ids)
    mu = chain.next_mu(candidates, sampler, chain.draw(candidates, sampler, len(history)))
    assert (mu is not None) == (sampler.params.mirostat_tau > 0 and sampler.params.temperature > 0)
    assert mu is None or math.isfinite(mu)


# These steps depend on sums, whose rounding depends on the order; the test after the next one covers them.
BY_SUMS = ("top_n_sigma", "mirostat")


@settings(deadline=None, max_examples=60)
@given(
    row=st.lists(st.integers(-12, 12), min_size=1, max_size=60),
    history=histories,
    sampler=any_sampler().filter(lambda sampler: sampler.params.dynatemp_range == 0),
    rng=st.randoms(use_true_random=False),
)
def test_no_step_depends_on_the_order_of_the_candidates(row, history, sampler, rng):
    ordered = gather_candidates(np.asarray(row, np.float32) / 4, 0)
    order = np.asarray(rng.sample(range(len(row)), len(row)))
    for step in chain.PENALTIES + chain.FILTERS:
        if step.name in BY_SUMS or (step.name == "temperature" and sampler.params.temperature == 0):
            continue
        expected = step.apply(ordered, sampler, history)
        shuffled = step.apply(Candidates(ordered.token_ids[order], ordered.scores[order]), sampler, history)
        back = np.argsort(shuffled.token_ids)
        np.testing.assert_array_equal(shuffled.token_ids[back], expected.token_ids)
        np.testing.assert_array_equal(shuffled.scores[back], expected.scores)
        assert chain.draw(shuffled, sampler, 5) == chain.draw(expected, sampler, 5)


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_sum_depend_on_the_order_no_more_than_rounding_does(seed):
    rng = np.random.default_rng(seed)
    candidates = gather_candidates(make_logits("normal", 1000, seed), 0)
    order = rng.permutation(1000)
    shuffled = Candidates(candidates.token_ids[order], candidates.scores[order])
    settings = {"temperature": 0.9, "dynatemp_range": 0.5, "top_n_sigma": 1.3, "mirostat_tau": 2.0}
    sampler = make_sampler(**settings, dynatemp_exponent=1.7, num_prompt_tokens=0)
    for step in chain.FILTERS:
        expected, actual = (step.apply(each, sampler, []) for each in (candidates, shuffled))
        back = np.argsort(actual.token_ids)
        np.testing.assert_array_equal(actual.token_ids[back], expected.token_ids)
        np.testing.assert_allclose(actual.scores[back], expected.scores, rtol=1e-13)
