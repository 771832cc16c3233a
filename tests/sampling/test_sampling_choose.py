"""Choosing a token: greedy, the law of the draws, what a draw depends on, and unusable logits."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_references import (
    EVERY_HISTORY,
    EVERY_LOGITS,
    EVERY_STEP,
    dry_penalties,
    dynamic_temperature,
    mirostat_kept,
    presence_and_frequency,
    softmax,
    top_n_sigma_kept,
    xtc_excluded,
)
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llmcli.errors import CheckpointError, UsageError
from llmcli.sampling.chain import choose, draw, gumbel, log_probabilities, run_steps, uniform
from llmcli.sampling.inspect import inspect_choice
from llmcli.sampling.params import Sampler, SamplingParams

PURE = SamplingParams(temperature=1, top_p=1)
GREEDY = SamplingParams(temperature=0)
# Upper 0.1 % points of chi-square by degrees of freedom: NIST/SEMATECH e-Handbook, table 1.3.6.7.4.
CHI_SQUARE_CRITICAL = {15: 37.697, 19: 43.820}


def make_logits(vocab_size, seed=0):
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocab_size", [1, 50, 32_000])
def test_greedy_takes_the_lowest_id_of_the_highest_logits(vocab_size):
    logits = np.zeros(vocab_size, np.float32)
    ties = sorted({vocab_size // 2, vocab_size * 2 // 3, vocab_size - 1})
    logits[ties] = 7
    for sample_index in range(5):
        assert choose(logits, [0], Sampler(GREEDY, 3, sample_index)).token_id == ties[0]


def test_greedy_applies_penalties_bias_and_bans_and_no_filter():
    logits = np.asarray([2.0, 1.9, -5.0], np.float32)
    params = SamplingParams(temperature=0, repetition_penalty=1.2, top_k=1, xtc_probability=1)
    assert choose(logits, [0], Sampler(params, 0)).token_id == 1
    assert choose(logits, [0, 1], Sampler(params, 0)).token_id == 0
    assert choose(logits, [0, 1], Sampler(params, 0, logit_bias={2: 8.0})).token_id == 2
    assert choose(logits, [0, 1], Sampler(params, 0, logit_bias={0: -np.inf})).token_id == 1
    assert choose(logits, [0, 1], Sampler(params, 0, eos_token_ids=frozenset({0}), ignore_eos=True)).token_id == 1
    assert choose(logits, [0, 0], Sampler(SamplingParams(temperature=0, frequency_penalty=0.1), 0)).token_id == 1
    assert choose(logits, [0, 0], Sampler(SamplingParams(temperature=0, presence_penalty=0.2), 0)).token_id == 1


def exact_probabilities():
    """The law of a draw with EVERY_STEP on, without the code under test: [vocab_size] float64."""
    window = torch.tensor([EVERY_HISTORY[-9:]])
    scores = torch.from_numpy(EVERY_LOGITS).double()[None]
    for processor in (
        SequenceBiasLogitsProcessor({(8,): 1.0, (20,): -1.5, (33,): -np.inf}),
        SequenceBiasLogitsProcessor(dict(EVERY_STEP.sequence_bias)),
        MinNewTokensLengthLogitsProcessor(5, 20, 12),
        EncoderRepetitionPenaltyLogitsProcessor(1.4, torch.tensor([EVERY_HISTORY[:5]])),
    ):
        scores = processor(torch.tensor([EVERY_HISTORY]), scores)
    scores = RepetitionPenaltyLogitsProcessor(1.3)(window, scores)
    for token, amount in presence_and_frequency(EVERY_HISTORY[5:][-9:], 0.4, 0.3).items():
        scores[0, token] += amount
    for token, penalty in dry_penalties(EVERY_HISTORY[-11:], 0.8, 1.75, 2, {2}).items():
        scores[0, token] -= penalty
    scores = scores / dynamic_temperature(alive(scores), 1.3, 0.3, 1.5)
    scores = only(top_n_sigma_kept(alive(scores), 2.8), scores)
    for warper in (TopKLogitsWarper(28), TopPLogitsWarper(0.96), MinPLogitsWarper(0.12), TypicalLogitsWarper(0.9)):
        scores = warper(window, scores)
    without_xtc = alive(scores)
    excluded = xtc_excluded(softmax(without_xtc), 0.08)
    with_xtc = {token: score for token, score in without_xtc.items() if token not in excluded}
    laws = []
    for left in (with_xtc, without_xtc):
        laws.append(only(mirostat_kept(left, 4.6), scores).softmax(-1)[0].numpy())
    return 0.4 * laws[0] + 0.6 * laws[1]


def alive(scores):
    """The tokens left in a row of scores [1, vocab_size], as a dict from token to score."""
    return {token: score for token, score in enumerate(scores[0].tolist()) if score > -math.inf}


def only(tokens, scores):
    """A row of scores [1, vocab_size] with these tokens alone."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[0, list(tokens)] = True
    return scores.masked_fill(~mask, -math.inf)


def test_the_whole_chain_draws_with_exact_probabilities():
    num_draws = 100_000
    position = len(EVERY_HISTORY)
    probabilities = exact_probabilities()

    # The race for all samples at once; the loop below ties it to `choose`.
    acts = uniform(42, np.arange(num_draws), position) < 0.4
    tokens = np.zeros(num_draws, np.int64)
    for mask in (acts, ~acts):
        samples = np.flatnonzero(mask)
        sampler = replace(EVERY_STEP, sample_index=int(samples[0]))
        *steps, (_, candidates) = run_steps(EVERY_LOGITS, EVERY_HISTORY, sampler)
        noise = gumbel(42, samples[:, None], position, candidates.token_ids)
        tokens[samples] = candidates.token_ids[(candidates.scores + noise).argmax(axis=1)]
    for index in range(0, num_draws, 100):
        choice = choose(EVERY_LOGITS, EVERY_HISTORY, replace(EVERY_STEP, sample_index=index))
        assert choice.token_id == tokens[index]

    drawn = np.flatnonzero(probabilities)
    assert set(tokens) <= set(drawn)
    degrees = len(drawn) - 1
    counts = np.bincount(tokens, minlength=40)[drawn]
    assert chi_square(counts, probabilities[drawn]) < CHI_SQUARE_CRITICAL[degrees]
    assert chi_square(counts, np.roll(probabilities[drawn], 1)) > CHI_SQUARE_CRITICAL[degrees]


def test_every_step_took_part_in_the_draws():
    for index in range(20):
        sampler = replace(EVERY_STEP, sample_index=index)
        if uniform(42, index, len(EVERY_HISTORY)) < 0.4:
            steps = inspect_choice(EVERY_LOGITS, EVERY_HISTORY, sampler, 0, 0).steps
            assert [step.name for step in steps if not step.changed] == ["begin_suppress"]


def test_successive_positions_are_drawn_independently():
    """Pairs of draws, of neighbouring positions or of two seeds, fall into the 16 cells of the product law."""
    num_draws = 20_000
    _, candidates = next(run_steps(make_logits(4), [], Sampler(PURE, 0)))
    weights = np.exp(candidates.scores)
    weights /= weights.sum()
    positions = np.arange(num_draws)[:, None]
    tokens, other_seed = (
        (candidates.scores + gumbel(seed, 0, positions, candidates.token_ids)).argmax(axis=1) for seed in (11, 12)
    )
    for first, second in ((tokens[0::2], tokens[1::2]), (tokens, other_seed)):
        cells = np.bincount(first * 4 + second, minlength=16)
        assert chi_square(cells, np.outer(weights, weights).ravel()) < CHI_SQUARE_CRITICAL[15]
    assert abs(statistics.correlation(tokens.tolist(), other_seed.tolist())) < 4 / math.sqrt(num_draws)


def test_choose_uses_the_length_of_the_history_as_position():
    logits = make_logits(200)
    for position in (0, 1, 7, 500):
        sampler = Sampler(PURE, 99, 3)
        *_, (_, candidates) = run_steps(logits, [], sampler)
        assert choose(logits, [1] * position, sampler).token_id == draw(candidates, sampler, position)
    assert len({choose(logits, [1] * position, sampler).token_id for position in range(50)}) > 20


def generate(sampler, num_tokens=30):
    """A toy model whose logits depend on the last token."""
    history = [1]
    for _ in range(num_tokens):
        history.append(choose(make_logits(100, seed=history[-1]), history, sampler).token_id)
    return history


def test_a_text_is_a_function_of_seed_and_sample():
    texts = [generate(Sampler(SamplingParams(), 7, sample_index)) for sample_index in range(4)]
    assert generate(Sampler(SamplingParams(), 7, 2)) == texts[2]
    assert len({tuple(text) for text in texts}) == 4
    assert generate(Sampler(SamplingParams(), 8, 2)) != texts[2]
    assert generate(Sampler(SamplingParams(), 7 + 2**32, 2)) != texts[2]


def test_a_draw_leaves_its_inputs_alone():
    logits = make_logits(50)
    before = logits.copy()
    logits.flags.writeable = False
    choose(logits, np.arange(10), Sampler(SamplingParams(repetition_penalty=2, top_k=5), 1), with_logprob=True)
    np.testing.assert_array_equal(logits, before)


def test_a_masked_token_is_never_drawn():
    logits = np.full(20, -np.inf, np.float32)
    logits[[4, 9]] = [-1e30, -1e30]
    drawn = {choose(logits, [], Sampler(PURE, 5, sample_index)).token_id for sample_index in range(100)}
    assert drawn == {4, 9}


def test_logprob_is_that_of_the_unmodified_logits():
    logits = make_logits(1000) * 20
    sampler = Sampler(SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.5), 0)
    assert choose(logits, [1, 2], sampler).logprob is None
    choice = choose(logits, [1, 2], sampler, with_logprob=True)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[choice.token_id]), rel=1e-12)
    np.testing.assert_allclose(log_probabilities(logits), expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [([0, np.nan, -np.inf], "NaN"), ([np.nan, np.inf, 0], "NaN"), ([0, np.inf, 1], "infinite"),
     ([-np.inf, -np.inf], "only -inf")],
)  # fmt: skip
@pytest.mark.parametrize("params", [SamplingParams(), GREEDY])
def test_unusable_logits_are_refused(bad, kind, params):
    with pytest.raises(CheckpointError) as error:
        choose(np.asarray(bad, np.float32), [5, 6, 7], Sampler(params, 0))
    assert str(error.value) == (
        f"the model produced {kind} logits at position 3, expected finite numbers: "
        "its weights are damaged or overflow; download it again, or run it with --dtype float32 if it ran in "
        "another type"
    )


@pytest.mark.parametrize(
    ("name", "value", "bits"),
    [("seed", -1, 64), ("seed", 2**64, 64), ("seed", 1.5, 64), ("seed", True, 64),
     ("sample_index", -1, 32), ("sample_index", 2**32, 32)],
)  # fmt: skip
def test_a_key_out_of_range_is_refused(name, value, bits):
    with pytest.raises(UsageError) as error:
        Sampler(PURE, **({"seed": 0} | {name: value}))
    assert str(error.value) == f"{name} is {value!r}, expected an integer >= 0 and < 2^{bits}"
    Sampler(PURE, **({"seed": 0} | {name: 2**bits - 1}))


@pytest.mark.parametrize(("token_id", "bias"), [(7, math.nan), (7, math.inf), (-1, 1.0)])
def test_a_bias_out_of_range_is_refused(token_id, bias):
    with pytest.raises(UsageError) as error:
        Sampler(PURE, 0, logit_bias={3: 1.0, token_id: bias})
    assert str(error.value) == (
        f"the logit bias of token {token_id} is {bias}, expected a token id >= 0 and a finite number or -inf"
    )


def test_a_sampler_is_a_value():
    first, second = (Sampler(PURE, 1, logit_bias={3: 1.0}, eos_token_ids=frozenset({2})) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != replace(first, logit_bias={3: 2.0})
