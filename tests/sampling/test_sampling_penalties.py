"""Bias, bans and penalties: against transformers' processors where they exist, else the published description."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_references import (
    apply_step,
    dry_penalties,
    every_row,
    last,
    make_logits,
    presence_and_frequency,
    reference_scores,
    survivors_of,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from llmcli.errors import UsageError

HISTORY = [7, 3, 9, 3, 3, 11, 7, 49, 3, 9]
WINDOWS = [0, 1, 4, 10, 99]


def added(scores, logits):
    """What a step has added to which token."""
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
        f"{what} every token that is left at position 10, expected at least one to choose: ban fewer tokens"
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
    """What DRY adds to the zero logits of 12 tokens."""
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
