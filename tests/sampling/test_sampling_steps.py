"""Each step of the chain against transformers' processor of the same name, in float64, and properties of all."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmcli.sampling import chain
from llmcli.sampling.chain import Candidates, gather_candidates, run_steps
from llmcli.sampling.params import SamplingParams

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
NO_HISTORY = np.zeros(0, np.int64)


def reference_scores(processor, scores, history=NO_HISTORY):
    """What a transformers processor makes of one row of scores, float64 [vocab_size]."""
    return processor(torch.from_numpy(np.asarray(history))[None], torch.from_numpy(scores)[None].clone())[0].numpy()


def make_logits(kind, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(vocab_size) * 3
    if kind == "ties":
        logits = np.round(logits)
    if kind == "masked":
        logits[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
    if kind == "spike":
        logits[vocab_size // 3] = 1e4
    if kind == "huge":
        logits *= 1e37
    if kind == "flat":
        logits *= 1e-3
    return logits.astype(np.float32)


def survivors_of(scores):
    return np.flatnonzero(scores > -np.inf)


def apply_step(name, logits, history=NO_HISTORY, **params):
    """One step on all candidates of the logits, as (token ids, scores)."""
    step = next(step for step in chain.PENALTIES + chain.FILTERS if step.name == name)
    return step.apply(gather_candidates(logits, 0), SamplingParams(**(OFF | params)), history)


KINDS = ["normal", "ties", "masked", "spike", "huge", "flat"]
VOCAB_SIZES = [50, 1000, 32_000]
every_row = pytest.mark.parametrize(
    "logits", [make_logits(kind, size) for kind in KINDS for size in VOCAB_SIZES],
    ids=[f"{kind}-{size}" for kind in KINDS for size in VOCAB_SIZES],
)  # fmt: skip


@every_row
@pytest.mark.parametrize("penalty", [0.5, 1.1, 3.0])
def test_repetition_penalty(logits, penalty):
    history = np.random.default_rng(1).integers(0, len(logits), 40)
    history[20:] = history[:20]  # a token seen twice is penalised once
    expected = reference_scores(RepetitionPenaltyLogitsProcessor(penalty), logits.astype(np.float64), history)
    token_ids, scores = apply_step("repetition_penalty", logits, history, repetition_penalty=penalty)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_allclose(scores, expected[token_ids], rtol=1e-15)
    assert not np.array_equal(scores, logits[token_ids])


def test_repetition_penalty_ignores_history_beyond_the_vocabulary():
    logits = make_logits("normal", 50)
    _, scores = apply_step("repetition_penalty", logits, [50, 10**6], repetition_penalty=2.0)
    np.testing.assert_array_equal(scores, logits)


@every_row
@pytest.mark.parametrize("temperature", [0.05, 0.8, 2.5])
def test_temperature(logits, temperature):
    expected = reference_scores(TemperatureLogitsWarper(temperature), logits.astype(np.float64))
    token_ids, scores = apply_step("temperature", logits, temperature=temperature)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    shifted = expected - expected.max()
    np.testing.assert_allclose(scores, shifted[token_ids], rtol=1e-12, atol=1e-9 * np.abs(shifted[token_ids]).min())
    np.testing.assert_allclose(
        np.exp(scores) / np.exp(scores).sum(), torch.from_numpy(expected).softmax(-1).numpy()[token_ids], rtol=1e-11
    )


@every_row
@pytest.mark.parametrize("k", [1, 2, 40, 49, 50, 10**7])
def test_top_k(logits, k):
    expected = reference_scores(TopKLogitsWarper(k), logits.astype(np.float64))
    token_ids, scores = apply_step("top_k", logits, top_k=k)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, logits[token_ids])


def test_top_k_keeps_all_that_tie_with_the_last():
    logits = np.asarray([1, 3, 2, 2, 0, 2], np.float32)
    assert list(apply_step("top_k", logits, top_k=2).token_ids) == [1, 2, 3, 5]


@every_row
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.95, 0.9999])
def test_top_p(logits, p):
    expected = reference_scores(TopPLogitsWarper(p), logits.astype(np.float64))
    token_ids, scores = apply_step("top_p", logits, top_p=p)
    # Among equal scores transformers leaves open which survive, so with ties only the multiset of scores is fixed.
    np.testing.assert_array_equal(np.sort(scores), np.sort(expected[survivors_of(expected)]))
    np.testing.assert_array_equal(scores, logits[token_ids])
    if len(np.unique(logits)) == len(logits):
        np.testing.assert_array_equal(token_ids, survivors_of(expected))


def test_top_p_keeps_the_token_that_crosses_p():
    logits = np.log(np.asarray([0.1, 0.5, 0.15, 0.25])).astype(np.float32)
    assert list(apply_step("top_p", logits, top_p=0.49).token_ids) == [1]
    assert list(apply_step("top_p", logits, top_p=0.51).token_ids) == [1, 3]
    assert list(apply_step("top_p", logits, top_p=0.74).token_ids) == [1, 3]
    assert list(apply_step("top_p", logits, top_p=0.76).token_ids) == [1, 2, 3]


def test_top_p_keeps_the_lowest_ids_of_equals():
    logits = np.asarray([0, 5, 5, 5, 5, 0], np.float32)
    assert list(apply_step("top_p", logits, top_p=0.6).token_ids) == [1, 2, 3]
    assert list(apply_step("top_p", np.zeros(8, np.float32), top_p=0.5).token_ids) == [0, 1, 2, 3]


def test_top_p_just_below_one_survives_rounding():
    for seed in range(50):
        logits = make_logits("flat", 1000, seed)
        assert len(apply_step("top_p", logits, top_p=1 - 2.0**-53).token_ids) == 1000


@every_row
@pytest.mark.parametrize("p", [1e-9, 0.05, 0.5, 0.99])
def test_min_p(logits, p):
    expected = reference_scores(MinPLogitsWarper(p), logits.astype(np.float64))
    token_ids, scores = apply_step("min_p", logits, min_p=p)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, logits[token_ids])


def test_min_p_is_relative_to_the_likeliest_token():
    logits = np.log(np.asarray([0.4, 0.21, 0.19, 0.2 * 0.9, 0.02])).astype(np.float32)
    assert list(apply_step("min_p", logits, min_p=0.5).token_ids) == [0, 1]


@every_row
def test_the_whole_chain(logits):
    params = SamplingParams(temperature=0.7, top_k=45, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    history = np.random.default_rng(2).integers(0, len(logits), 30)
    expected = reference_scores(RepetitionPenaltyLogitsProcessor(1.2), logits.astype(np.float64), history)
    for processor in (
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(45),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ):
        expected = reference_scores(processor, expected)
    steps = list(run_steps(logits, history, params))
    assert [name for name, _ in steps] == ["logits", "repetition_penalty", "temperature", "top_k", "top_p", "min_p"]
    scores = np.sort(steps[-1][1].scores)
    expected = np.sort(expected[survivors_of(expected)] - expected.max())
    np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-12)


def test_a_step_that_is_off_changes_nothing():
    candidates = gather_candidates(make_logits("normal", 50), 0)
    for step in chain.PENALTIES + chain.FILTERS:
        if step.name != "temperature":
            assert step.apply(candidates, SamplingParams(**OFF), [1, 2]) is candidates


finite_rows = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-3, 3), min_size=1, max_size=60
)
any_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, exclude_min=True, max_value=1e300),
    top_k=st.integers(0, 70),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    repetition_penalty=st.floats(0, exclude_min=True, max_value=1e300),
)


@settings(deadline=None, max_examples=300)
@given(row=finite_rows, params=any_params, rng=st.randoms(use_true_random=False))
def test_at_least_one_token_survives_and_each_step_only_removes(row, params, rng):
    logits = np.asarray(row, np.float32)
    history = [rng.randrange(len(row)) for _ in range(5)]
    previous = set(range(len(row)))
    for _, (token_ids, scores) in run_steps(logits, history, params):
        assert 1 <= len(token_ids) == len(scores)
        assert set(token_ids) <= previous
        assert scores.max() > -np.inf
        assert not np.isnan(scores).any()
        previous = set(token_ids)


@settings(deadline=None, max_examples=300)
@given(
    row=st.lists(st.integers(-12, 12), min_size=1, max_size=60),
    params=any_params,
    rng=st.randoms(use_true_random=False),
)
def test_no_step_depends_on_the_order_of_the_candidates(row, params, rng):
    ordered = gather_candidates(np.asarray(row, np.float32) / 4, 0)
    order = np.asarray(rng.sample(range(len(row)), len(row)))
    history = [rng.randrange(len(row)) for _ in range(5)]
    sampler = chain.Sampler(params, seed=rng.randrange(2**64))
    for step in chain.PENALTIES + chain.FILTERS:
        expected = step.apply(ordered, params, history)
        shuffled = step.apply(Candidates(ordered.token_ids[order], ordered.scores[order]), params, history)
        back = np.argsort(shuffled.token_ids)
        np.testing.assert_array_equal(shuffled.token_ids[back], expected.token_ids)
        np.testing.assert_array_equal(shuffled.scores[back], expected.scores)
        assert chain.draw(shuffled, sampler, 5) == chain.draw(expected, sampler, 5)
