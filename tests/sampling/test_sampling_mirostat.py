"""Mirostat against llama.cpp's formulas, and its state is passed on as an argument."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sampling_references import apply_step, every_row, make_logits, make_sampler, mirostat_kept, mirostat_next_mu

from llmcli.sampling.chain import choose, run_steps
from llmcli.sampling.inspect import inspect_choice


def scores_of(logits):
    return {token: float(score) for token, score in enumerate(logits) if score > -np.inf}


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


@pytest.mark.parametrize("tau", [1.0, 2.0, 3.0])
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
    drawn = [choose(logits, [0] * position, sampler).token_id for position in range(6_000)]
    counts = np.asarray([drawn.count(token) for token in kept])
    assert counts.sum() == 6_000
    assert (np.abs(counts - 6_000 * law) < 4.5 * np.sqrt(6_000 * law * (1 - law))).all()


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
