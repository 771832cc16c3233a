"""Temperature and filters against transformers' processors of the same name, the others against their descriptions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_references import (
    apply_step,
    dynamic_temperature,
    every_row,
    make_logits,
    make_sampler,
    mirostat_kept,
    mirostat_next_mu,
    reference_scores,
    survivors_of,
    top_n_sigma_kept,
    xtc_excluded,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llmcli.sampling.candidates import gather_candidates
from llmcli.sampling.chain import choose, run_steps, uniform
from llmcli.sampling.inspect import inspect_choice


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


def scores_of(logits):
    return {token: float(score) for token, score in enumerate(logits) if score > -np.inf}


@every_row
@pytest.mark.parametrize(("reach", "exponent"), [(0.3, 1.0), (0.8, 0.5), (2.0, 3.0)])
def test_dynamic_temperature(logits, reach, exponent):
    expected = dynamic_temperature(scores_of(logits), 0.8, reach, exponent)
    token_ids, scores = apply_step(
        "temperature", logits, temperature=0.8, dynatemp_range=reach, dynatemp_exponent=exponent
    )
    np.testing.assert_array_equal(token_ids, np.flatnonzero(logits > -np.inf))
    shifted = (logits[token_ids].astype(np.float64)) - float(logits.max())
    if expected == 0:
        np.testing.assert_array_equal(scores, np.where(shifted == 0, 0, -np.inf))
    else:
        # Logarithms of 32,000 probabilities, rounded twice, to the power of the exponent.
        np.testing.assert_allclose(scores, shifted / expected, rtol=1e-10)


def test_dynamic_temperature_on_examples():
    # Two equal tokens are the least certain; a certain one leaves only the lower end of the range.
    for logits, expected in (([0, 0], 1.2), ([0, -1000], 0.4), ([3], 0.8)):
        logits = np.asarray(logits, np.float32)
        _, scores = apply_step("temperature", logits, temperature=0.8, dynatemp_range=0.4)
        np.testing.assert_allclose(scores, (logits - logits.max()) / expected, rtol=1e-12)
    # Entropy of (3/4, 1/4) is 0.8113 bits of 1 bit; squared, 0.6582.
    _, scores = apply_step(
        "temperature", np.log(np.asarray([3, 1], np.float32)), dynatemp_range=0.5, dynatemp_exponent=2
    )
    assert -scores[1] == pytest.approx(np.log(3) / (0.5 + 1.0 * 0.811278**2), rel=1e-5)


@pytest.mark.parametrize("logits", [[5, 5, 2], [3e38, -3e38], [1, 0, -np.inf]])
def test_a_dynamic_temperature_of_zero_leaves_all_probability_to_the_likeliest(logits):
    logits = np.asarray(logits, np.float32)
    settings = {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 1e5}
    token_ids, scores = apply_step("temperature", logits, **settings)
    np.testing.assert_array_equal(scores, np.where(logits[token_ids] == logits.max(), 0, -np.inf))
    drawn = {choose(logits, [], make_sampler(seed=seed, **settings)).token_id for seed in range(50)}
    assert drawn == set(np.flatnonzero(logits == logits.max()))


@pytest.mark.parametrize("n", [0.01, 1.0, 1.7e308])
@pytest.mark.parametrize("temperature", [1e-320, 0.5, 1.7e308])
@pytest.mark.parametrize("reach", [0.0, 1.7e308])
def test_absurd_settings_give_no_nan(n, temperature, reach):
    for kind in ("normal", "huge", "flat"):
        sampler = make_sampler(temperature=temperature, dynatemp_range=reach, top_n_sigma=n)
        *_, (_, candidates) = run_steps(make_logits(kind, 50), [], sampler)
        assert not np.isnan(candidates.scores).any()
        assert candidates.scores.max() > -np.inf


@every_row
@pytest.mark.parametrize("n", [0.1, 1.0, 1.5, 3.0])
def test_top_n_sigma(logits, n):
    token_ids, scores = apply_step("top_n_sigma", logits, top_n_sigma=n)
    assert set(token_ids) == top_n_sigma_kept(scores_of(logits), n)
    np.testing.assert_array_equal(scores, logits[token_ids])


def test_top_n_sigma_on_an_example():
    # The mean is 0, the variance (of the population) 72 / 5.
    logits = np.asarray([4, 4, 0, -2, -6], np.float32)
    sigma = np.sqrt(72 / 5)
    assert list(apply_step("top_n_sigma", logits, top_n_sigma=3.99 / sigma).token_ids) == [0, 1]
    assert list(apply_step("top_n_sigma", logits, top_n_sigma=4.01 / sigma).token_ids) == [0, 1, 2]
    assert list(apply_step("top_n_sigma", logits, top_n_sigma=6.01 / sigma).token_ids) == [0, 1, 2, 3]
    assert list(apply_step("top_n_sigma", np.zeros(4, np.float32), top_n_sigma=1e-9).token_ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_top_n_sigma_does_not_care_about_the_temperature(temperature):
    for seed in range(20):
        logits = make_logits("normal", 1000, seed)
        *_, (_, candidates) = run_steps(logits, [], make_sampler(temperature=temperature, top_n_sigma=1.5))
        assert set(candidates.token_ids) == top_n_sigma_kept(scores_of(logits), 1.5)


def test_top_n_sigma_measures_finite_scores_only():
    # At this temperature all scores but the two highest are -inf, and the deviation of those two is 0.
    logits = np.asarray([3, 1, 3, 0], np.float32)
    *_, (_, candidates) = run_steps(logits, [], make_sampler(temperature=1e-320, top_n_sigma=1))
    assert list(candidates.token_ids) == [0, 2]


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
    # transformers does not say which of equal scores survive, so with ties only the multiset of scores is fixed.
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
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.95, 0.9999])
def test_typical_p(logits, p):
    expected = reference_scores(TypicalLogitsWarper(p), logits.astype(np.float64))
    token_ids, scores = apply_step("typical_p", logits, typical_p=p)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, logits[token_ids])


def test_typical_p_prefers_the_average_surprise_to_the_highest_probability():
    logits = np.log(np.asarray([0.5, 0.2, 0.2, 0.05, 0.05])).astype(np.float32)
    # The entropy is 1.29; the surprises are 0.69, 1.61 and 3.00.
    assert list(apply_step("typical_p", logits, typical_p=0.3).token_ids) == [1, 2]
    assert list(apply_step("typical_p", logits, typical_p=0.5).token_ids) == [0, 1, 2]


def test_typical_p_takes_scores_of_no_probability():
    logits = np.asarray([3, 2, -3e38], np.float32)
    assert list(apply_step("typical_p", logits, typical_p=0.9).token_ids) == [0, 1]
    # At this temperature all scores but the highest are -inf.
    *_, (_, candidates) = run_steps(logits, [], make_sampler(temperature=1e-320, typical_p=0.9))
    assert list(candidates.token_ids) == [0]


@every_row
@pytest.mark.parametrize("threshold", [1e-4, 0.02, 0.1, 0.5])
def test_xtc(logits, threshold):
    token_ids, scores = apply_step("xtc", logits, xtc_probability=1, xtc_threshold=threshold)
    np.testing.assert_array_equal(scores, logits[token_ids])
    removed = set(range(len(logits))) - set(token_ids) - set(np.flatnonzero(logits == -np.inf))
    probabilities = torch.from_numpy(logits).double().softmax(-1).numpy()
    if len(np.unique(logits)) == len(logits):
        assert removed == xtc_excluded(dict(enumerate(probabilities)), threshold)
    viable = probabilities[probabilities >= threshold]
    assert removed == set(np.flatnonzero(probabilities > viable.min() if len(viable) else []))


def test_xtc_keeps_the_least_likely_of_the_likely():
    logits = np.log(np.asarray([0.02, 0.3, 0.15, 0.4, 0.08, 0.05])).astype(np.float32)
    assert list(apply_step("xtc", logits, xtc_probability=1).token_ids) == [0, 2, 4, 5]
    assert list(apply_step("xtc", logits, xtc_probability=1, xtc_threshold=0.35).token_ids) == [0, 1, 2, 3, 4, 5]


def test_xtc_counts_a_token_at_the_threshold():
    logits = np.asarray([1, 0, -1], np.float32)
    threshold = float(gather_candidates(logits, 0).probabilities()[1])
    assert list(apply_step("xtc", logits, xtc_probability=1, xtc_threshold=threshold).token_ids) == [1, 2]
    above = np.nextafter(threshold, 1)
    assert list(apply_step("xtc", logits, xtc_probability=1, xtc_threshold=above).token_ids) == [0, 1, 2]


def test_xtc_keeps_all_that_tie_for_least_likely():
    assert list(apply_step("xtc", np.zeros(2, np.float32), xtc_probability=1, xtc_threshold=0.5).token_ids) == [0, 1]
    logits = np.asarray([2, 0, 2, 5], np.float32)
    assert list(apply_step("xtc", logits, xtc_probability=1, xtc_threshold=0.01).token_ids) == [0, 1, 2]


@pytest.mark.parametrize(("eos", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (0, [0, 2])])
def test_xtc_does_nothing_where_it_would_remove_the_end_of_the_text(eos, expected):
    logits = np.log(np.asarray([0.05, 0.5, 0.15, 0.3])).astype(np.float32)
    token_ids, _ = apply_step("xtc", logits, xtc_probability=1, eos_token_ids=frozenset({eos, 99}))
    assert list(token_ids) == expected


def test_xtc_acts_as_often_as_it_is_asked_to_and_by_its_own_number():
    logits = np.asarray([1, 1, 0.5], np.float32)
    history = [4] * 17
    acts = [
        len(apply_step("xtc", logits, history, xtc_probability=0.3, seed=5, sample_index=index).token_ids) == 1
        for index in range(2000)
    ]
    np.testing.assert_array_equal(acts, uniform(5, np.arange(2000), 17) < 0.3)
    assert abs(sum(acts) - 600) < 4 * np.sqrt(2000 * 0.3 * 0.7)  # four standard deviations of the binomial law


# Mirostat against llama.cpp's formulas, and its state is passed on as an argument.


@every_row
@pytest.mark.parametrize("mu", [-3.0, 0.0, 0.5, 3.3, 7.1, 40.0])
def test_mirostat_keeps_the_tokens_whose_surprise_is_at_most_mu(logits, mu):
    token_ids, scores = apply_step("mirostat", logits, mirostat_tau=3, mirostat_mu=mu)
    expected = mirostat_kept(scores_of(logits), mu)
    np.testing.assert_array_equal(scores, logits[token_ids])
    if len(expected) > 1:
        assert set(token_ids) == expected
    else:  # llama.cpp's sort decides between equals
        assert set(token_ids) == set(np.flatnonzero(logits == logits.max()))


def test_mu_starts_at_two_tau():
    logits = make_logits("flat", 1000)
    for tau in (1.0, 4.9, 5.1):
        first, given = ({"mirostat_tau": tau, "mirostat_mu": mu} for mu in (None, 2 * tau))
        assert list(apply_step("mirostat", logits, **first).token_ids) == list(
            apply_step("mirostat", logits, **given).token_ids
        )
    assert len(apply_step("mirostat", logits, mirostat_tau=6).token_ids) == 1000  # 1,000 even tokens have 10 bits each


def generate(sampler, num_tokens, start=0):
    """Tokens and values of mu of a toy model whose logits depend on the position."""
    tokens, mus = [], []
    for position in range(start, start + num_tokens):
        logits = make_logits("normal", 500, position)
        choice = choose(logits, [0] * position, sampler)
        sampler = replace(sampler, mirostat_mu=choice.mirostat_mu)
        tokens.append(choice.token_id)
        mus.append(choice.mirostat_mu)
    return tokens, mus


def test_mu_moves_by_the_surprise_of_what_was_drawn():
    tau, eta = 3.0, 0.3
    tokens, mus = generate(make_sampler(mirostat_tau=tau, mirostat_eta=eta, seed=5), 200)
    mu = 2 * tau
    for position, (token, next_mu) in enumerate(zip(tokens, mus, strict=True)):
        scores = scores_of(make_logits("normal", 500, position))
        kept = mirostat_kept(scores, mu)
        assert token in kept
        mu = mirostat_next_mu({token: scores[token] for token in kept}, token, mu, tau, eta)
        assert next_mu == pytest.approx(mu, rel=1e-12)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_the_surprise_comes_to_tau(tau):
    """mu_n - mu_0 = -eta * sum(surprise - tau), so a mu that stays bounded means a mean surprise of tau."""
    tokens, mus = generate(make_sampler(mirostat_tau=tau, mirostat_eta=0.1, seed=1), 1500)
    assert all(0 < mu < 12 for mu in mus)
    mu, surprises = 2 * tau, []
    for position, (token, next_mu) in enumerate(zip(tokens, mus, strict=True)):
        scores = scores_of(make_logits("normal", 500, position))
        weights = {each: math.exp(scores[each]) for each in mirostat_kept(scores, mu)}
        surprises.append(-math.log2(weights[token] / math.fsum(weights.values())))
        mu = next_mu
    assert np.mean(surprises[300:]) == pytest.approx(tau, abs=0.12)  # 12 bits of mu over 1,200 tokens at eta 0.1 is 0.1


def test_draws_follow_the_kept_tokens_law():
    logits = make_logits("normal", 60)
    sampler = make_sampler(mirostat_tau=2, mirostat_mu=3.5)
    weights = {token: math.exp(score) for token, score in scores_of(logits).items()}
    kept = sorted(mirostat_kept(scores_of(logits), 3.5))
    law = np.asarray([weights[token] for token in kept]) / math.fsum(weights[token] for token in kept)
    drawn = [choose(logits, [0] * position, sampler).token_id for position in range(3_000)]
    counts = np.asarray([drawn.count(token) for token in kept])
    assert counts.sum() == 3_000
    assert (np.abs(counts - 3_000 * law) < 4.5 * np.sqrt(3_000 * law * (1 - law))).all()


def test_the_same_mu_gives_the_same_choice_and_a_text_goes_on_from_its_mu():
    sampler = make_sampler(mirostat_tau=3, seed=8)
    tokens, mus = generate(sampler, 40)
    assert generate(sampler, 40) == (tokens, mus)
    again, _ = generate(replace(sampler, mirostat_mu=mus[24]), 15, start=25)
    assert again == tokens[25:]
    logits, history = make_logits("normal", 500, 25), [0] * 25
    steps = inspect_choice(logits, history, replace(sampler, mirostat_mu=mus[24]), tokens[25], 0).steps
    *_, (_, candidates) = run_steps(logits, history, replace(sampler, mirostat_mu=mus[24]))
    assert (steps[-1].name, steps[-1].num_left) == ("mirostat", len(candidates.token_ids))
    assert steps[-1].chosen_probability > 0


def test_without_mirostat_and_where_it_does_not_run_there_is_no_mu():
    logits = make_logits("normal", 50)
    for settings in ({}, {"mirostat_tau": 3, "temperature": 0}):
        assert choose(logits, [1], make_sampler(**settings)).mirostat_mu is None


@pytest.mark.parametrize("tau", [1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("eta", [0.0, 1e-300, 1.7e308])
def test_absurd_settings_keep_mu_finite(tau, eta):
    for kind in ("normal", "huge", "flat"):
        sampler = make_sampler(mirostat_tau=tau, mirostat_eta=eta)
        for position in range(5):
            choice = choose(make_logits(kind, 50, position), [0] * position, sampler)
            assert math.isfinite(choice.mirostat_mu)
            sampler = replace(sampler, mirostat_mu=choice.mirostat_mu)
