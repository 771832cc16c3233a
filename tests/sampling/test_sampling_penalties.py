"""Bias, bans and penalties: against transformers' processors where they exist, else the published description."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_references import (
    apply_step,
    dry_penalties,
    every_row,
    last,
    make_logits,
    make_sampler,
    presence_and_frequency,
    reference_scores,
    survivors_of,
)
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from llmcli.errors import UsageError
from llmcli.sampling.chain import PENALTIES, choose, run_steps

HISTORY = [7, 3, 9, 3, 3, 11, 7, 49, 3, 9]
WINDOWS = [0, 1, 4, 10, 99]


def added(scores, logits):
    """What a step adds to which token."""
    differences = scores.astype(np.float64) - logits
    return {int(token): float(differences[token]) for token in np.flatnonzero(differences)}


@every_row
def test_logit_bias(logits):
    bias = {0: 2.5, 7: -0.25, len(logits) - 1: -np.inf, len(logits) // 3: 100.0}
    processor = SequenceBiasLogitsProcessor({(token,): float(amount) for token, amount in bias.items()})
    expected = reference_scores(processor, logits.astype(np.float64))
    token_ids, scores = apply_step("logit_bias", logits, logit_bias=bias)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, expected[token_ids])


def test_logit_bias_beyond_the_vocabulary_changes_nothing():
    logits = make_logits("normal", 50)
    token_ids, scores = apply_step("logit_bias", logits, logit_bias={50: 3.0, 10**15: -np.inf})
    np.testing.assert_array_equal(token_ids, np.arange(50))
    np.testing.assert_array_equal(scores, logits)


def test_a_huge_bias_stays_finite():
    _, scores = apply_step("logit_bias", make_logits("huge", 50), logit_bias={1: 1.7e308, 2: -1.7e308})
    assert (scores[1], scores[2]) == (1e300, -1e300)


SEQUENCES = {
    (3, 9): -1.5,
    (9, 3): 2.0,
    (7, 49, 3, 9, 11): 4.0,
    (49, 3, 9, 11): -0.5,
    (3, 9, 12): -np.inf,
    (9, 9, 13): 5.0,
    (14,): 1.25,
    (*HISTORY, 15): 1.0,
    (1, *HISTORY, 15): 8.0,
}


@every_row
@pytest.mark.parametrize("length", [0, 1, 9, 10])
def test_sequence_bias(logits, length):
    history = np.asarray(HISTORY[:length], np.int64)
    expected = reference_scores(SequenceBiasLogitsProcessor(dict(SEQUENCES)), logits.astype(np.float64), history)
    for form in (history, history.tolist()):
        token_ids, scores = apply_step("sequence_bias", logits, form, sequence_bias=tuple(SEQUENCES.items()))
        np.testing.assert_array_equal(token_ids, survivors_of(expected))
        np.testing.assert_array_equal(scores, expected[token_ids])


def test_sequences_that_complete_to_the_same_token_add_up():
    logits = np.zeros(60, np.float32)
    _, scores = apply_step("sequence_bias", logits, HISTORY, sequence_bias=tuple(SEQUENCES.items()))
    # 12 is gone, so that what follows it has moved up by one.
    assert added(scores, np.zeros(59)) == {3: 2.0, 11: 3.5, 13: 1.25, 14: 1.0}
    twice = (((9, 5), 1.0), ((9, 5), 1.0), ((9, 6), -np.inf), ((6,), 3.0), ((99,), 1.0), ((9, 99), 1.0))
    token_ids, scores = apply_step("sequence_bias", logits, HISTORY, sequence_bias=twice)
    assert (scores[5], 6 in token_ids, len(token_ids)) == (2.0, False, 59)


@every_row
def test_bad_words(logits):
    words = [[9, 5], [3, 9, 0], [8, 9, 1], [2], [4]]
    expected = reference_scores(NoBadWordsLogitsProcessor(words, 4), logits.astype(np.float64), HISTORY)
    biases = tuple((tuple(word), -np.inf) for word in words if word != [4])
    token_ids, _ = apply_step("sequence_bias", logits, HISTORY, sequence_bias=biases)
    np.testing.assert_array_equal(token_ids, survivors_of(expected))


@every_row
@pytest.mark.parametrize("num_prompt_tokens", [9, 10, 11])
def test_begin_suppress(logits, num_prompt_tokens):
    suppressed = [0, 7, 30, 10**6]
    processor = SuppressTokensAtBeginLogitsProcessor(suppressed, num_prompt_tokens)
    expected = reference_scores(processor, logits.astype(np.float64), HISTORY)
    token_ids, scores = apply_step(
        "begin_suppress", logits, HISTORY, num_prompt_tokens=num_prompt_tokens,
        begin_suppress_token_ids=frozenset(suppressed),
    )  # fmt: skip
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, logits[token_ids])


@every_row
def test_a_bias_of_minus_infinity_suppresses(logits):
    expected = reference_scores(SuppressTokensLogitsProcessor([1, 5, 44]), logits.astype(np.float64))
    token_ids, _ = apply_step("logit_bias", logits, logit_bias=dict.fromkeys([1, 5, 44], -np.inf))
    np.testing.assert_array_equal(token_ids, survivors_of(expected))


@pytest.mark.parametrize("max_length", [10, 11, 12])
@pytest.mark.parametrize("temperature", [0, 1])
def test_forced_eos(max_length, temperature):
    """At one position of the text a forced token is certain, whatever biases and penalties say."""
    logits = make_logits("normal", 50)
    forced = [9, 31, 44]
    processor = ForcedEOSTokenLogitsProcessor(max_length, forced)
    expected = reference_scores(processor, logits.astype(np.float64), HISTORY)
    sampler = make_sampler(
        temperature=temperature, forced_eos_token_ids=frozenset({*forced, 99}), forced_eos_position=max_length - 1,
        eos_token_ids=frozenset(forced), min_new_tokens=50, repetition_penalty=1.5, frequency_penalty=0.5,
        logit_bias={31: 5.0, 9: -np.inf},
    )  # fmt: skip
    steps = list(run_steps(logits, HISTORY, sampler))
    if max_length - 1 != len(HISTORY):
        assert "forced_eos" not in [name for name, _ in steps]
        assert not {9, 31, 44} & set(steps[-1][1].token_ids)
        return
    assert [name for name, _ in steps][:2] == ["logits", "forced_eos"]
    assert not {name for name, _ in steps} & {step.name for step in PENALTIES}
    np.testing.assert_array_equal(steps[-1][1].token_ids, survivors_of(expected))
    np.testing.assert_array_equal(steps[-1][1].scores, expected[forced])
    chosen = {choose(logits, HISTORY, replace(sampler, seed=seed)).token_id for seed in range(60)}
    assert chosen == ({9} if temperature == 0 else set(forced))


@every_row
@pytest.mark.parametrize("strength", [0.3, 1.2, 5.0])
@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 6, 10])
def test_encoder_repetition_penalty(logits, strength, num_prompt_tokens):
    prompt = torch.tensor([HISTORY[:num_prompt_tokens]], dtype=torch.int64)
    processor = EncoderRepetitionPenaltyLogitsProcessor(strength, prompt)
    expected = reference_scores(processor, logits.astype(np.float64), HISTORY)
    settings = {"encoder_repetition_penalty": strength, "num_prompt_tokens": num_prompt_tokens, "penalty_window": 2}
    token_ids, scores = apply_step("encoder_repetition_penalty", logits, HISTORY, **settings)
    np.testing.assert_array_equal(token_ids, survivors_of(logits))
    np.testing.assert_array_equal(scores, expected[token_ids])


@pytest.mark.parametrize("strength", [5e-324, 1e-300, 1.7e308])
def test_an_absurd_encoder_repetition_penalty_stays_finite(strength):
    logits = np.asarray([2, -2, 0, 1], np.float32)
    settings = {"encoder_repetition_penalty": strength, "num_prompt_tokens": 3}
    _, scores = apply_step("encoder_repetition_penalty", logits, [0, 1, 2], **settings)
    assert np.isfinite(scores).all()
    assert (scores[2], scores[3]) == (0, 1)


@every_row
@pytest.mark.parametrize("num_prompt_tokens", [0, 6, 7, 10])
def test_eos_ban_until_enough_new_tokens(logits, num_prompt_tokens):
    eos_token_ids = [2, 0, len(logits) - 1]
    processor = MinNewTokensLengthLogitsProcessor(num_prompt_tokens, 4, eos_token_ids)
    expected = reference_scores(processor, logits.astype(np.float64), HISTORY)
    token_ids, scores = apply_step(
        "eos_ban", logits, HISTORY, min_new_tokens=4, num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=frozenset(eos_token_ids),
    )  # fmt: skip
    np.testing.assert_array_equal(token_ids, survivors_of(expected))
    np.testing.assert_array_equal(scores, logits[token_ids])


def test_ignore_eos_bans_the_end_for_ever():
    logits = make_logits("normal", 50)
    settings = {"eos_token_ids": frozenset({4, 1000}), "num_prompt_tokens": 1}
    assert 4 in apply_step("eos_ban", logits, HISTORY * 10, **settings).token_ids
    token_ids, _ = apply_step("eos_ban", logits, HISTORY * 10, ignore_eos=True, **settings)
    np.testing.assert_array_equal(token_ids, [token for token in range(50) if token != 4])


@pytest.mark.parametrize(
    ("step", "settings", "what"),
    [
        ("logit_bias", {"logit_bias": {1: -np.inf, 2: -np.inf}}, "logit bias bans"),
        ("eos_ban", {"eos_token_ids": frozenset({1, 2}), "ignore_eos": True}, "min_new_tokens or ignore_eos bans"),
    ],
)
def test_a_ban_of_all_tokens_is_refused(step, settings, what):
    with pytest.raises(UsageError) as error:
        apply_step(step, np.asarray([-np.inf, 1, 2], np.float32), HISTORY, **settings)
    assert str(error.value) == (
        f"{what} every remaining token at position 10, expected at least one to choose: ban fewer tokens"
    )


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


@pytest.mark.parametrize("window", WINDOWS)
def test_repetition_penalty_looks_at_the_window_of_prompt_and_text(window):
    logits = make_logits("normal", 50)
    expected = reference_scores(
        RepetitionPenaltyLogitsProcessor(1.3), logits.astype(np.float64), np.asarray(last(HISTORY, window))
    )
    settings = {"repetition_penalty": 1.3, "penalty_window": window, "num_prompt_tokens": 8}
    np.testing.assert_array_equal(apply_step("repetition_penalty", logits, HISTORY, **settings).scores, expected)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_prompt_tokens", [0, 3, 10])
@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0), (0, 0.25), (-2, 0), (0, -1.5)])
def test_presence_and_frequency_penalty(window, num_prompt_tokens, presence, frequency):
    logits = np.round(make_logits("normal", 50))  # so that every sum below is exact
    generated = HISTORY[num_prompt_tokens:]
    expected = presence_and_frequency(last(generated, window), presence, frequency)
    settings = {"penalty_window": window, "num_prompt_tokens": num_prompt_tokens}
    _, with_presence = apply_step("presence_penalty", logits, HISTORY, presence_penalty=presence, **settings)
    _, with_frequency = apply_step("frequency_penalty", logits, HISTORY, frequency_penalty=frequency, **settings)
    assert added(with_presence + with_frequency - logits, logits) == expected


def test_penalties_of_a_prompt_alone_change_nothing():
    logits = make_logits("normal", 50)
    for name in ("presence_penalty", "frequency_penalty"):
        _, scores = apply_step(name, logits, HISTORY, num_prompt_tokens=10, **{name: 2})
        np.testing.assert_array_equal(scores, logits)


def dry_added(history, **settings):
    """DRY's change of the zero logits of 12 tokens."""
    logits = np.zeros(12, np.float32)
    _, scores = apply_step("dry", logits, history, **({"dry_multiplier": 0.75, "dry_base": 2.0} | settings))
    return added(scores, logits)


def test_dry_on_an_example():
    #          a  b  c  c  b  c  y  a  b  c
    history = [1, 2, 3, 3, 2, 3, 9, 1, 2, 3]
    # "a b c" was followed by c, "b c" by y, and "c" by b: lengths 3, 2 and 1.
    assert dry_added(history) == {3: -0.75 * 2, 9: -0.75}
    assert dry_added(history, dry_allowed_length=1) == {3: -0.75 * 4, 9: -0.75 * 2, 2: -0.75}
    assert dry_added(history, dry_allowed_length=4) == {}
    assert dry_added(history, dry_window=8) == {9: -0.75}
    assert dry_added(history, dry_breaker_token_ids=frozenset({1})) == {3: -0.75, 9: -0.75}
    assert dry_added(history, dry_breaker_token_ids=frozenset({9})) == {3: -0.75 * 2}
    assert dry_added(history, dry_breaker_token_ids=frozenset({3})) == {}
    assert dry_added(history, num_prompt_tokens=10) == dry_added(history)  # the prompt counts as text


@settings(deadline=None, max_examples=400)
@given(
    history=st.lists(st.integers(0, 3), max_size=30),
    breakers=st.frozensets(st.integers(0, 5), max_size=2),
    allowed_length=st.integers(1, 4),
    window=st.sampled_from([0, 1, 2, 5, 12, 29, 30, 99]),
)
def test_dry_equals_a_search_of_all_copies(history, breakers, allowed_length, window):
    expected = dry_penalties(last(history, window), 0.75, 2.0, allowed_length, breakers)
    actual = dry_added(history, dry_allowed_length=allowed_length, dry_window=window, dry_breaker_token_ids=breakers)
    assert actual == {token: -penalty for token, penalty in expected.items()}


def test_dry_in_a_long_loop_grows_up_to_its_bound():
    assert dry_added([1, 2] * 20)[1] == -0.75 * 2.0 ** (38 - 2)
    assert dry_added([1, 2] * 33)[1] == -0.75 * 2.0 ** (64 - 2)
    assert dry_added([1, 2] * 34)[1] == -0.75 * 2.0**64
    assert dry_added([1, 2] * 500)[1] == -0.75 * 2.0**64
    assert dry_added([1, 2] * 500, dry_allowed_length=70)[1] == -0.75 * 2.0**64
    assert dry_added([1, 2] * 500, dry_base=1e300)[1] == -1e300


def test_dry_ignores_tokens_beyond_the_vocabulary():
    assert dry_added([10**6, 5, 10**6, 5], dry_allowed_length=1) == {}
    assert dry_added([5, 10**6, 5, 10**6], dry_allowed_length=1) == {5: -0.75 * 2}


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_dry_needs_two_tokens(num_tokens):
    assert dry_added([3] * num_tokens, dry_allowed_length=1) == {}
