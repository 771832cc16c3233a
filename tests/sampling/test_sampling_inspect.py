"""Inspections: log-probabilities against torch's, effects against an example and against the chain itself."""

import numpy as np
import pytest
import torch
from sampling_references import EVERY_HISTORY, EVERY_LOGITS, EVERY_STEP, make_logits, make_sampler

from llmcli.errors import CheckpointError
from llmcli.sampling.chain import choose, run_steps
from llmcli.sampling.inspect import Inspection, TokenLogprob, TokenProbability, inspect_choice, likeliest_tokens

# Tokens 0 to 4 with probabilities that are easy to follow.
PROBABILITIES = [0.4, 0.1, 0.3, 0.05, 0.15]
LOGITS = np.log(np.asarray(PROBABILITIES)).astype(np.float32)


def effects_of(inspection: Inspection) -> dict:
    return {step.name: step for step in inspection.steps}


@pytest.mark.parametrize("kind", ["normal", "masked", "huge"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_the_likeliest_tokens_and_their_log_probabilities(kind, count):
    logits = make_logits(kind, 1000)
    expected = torch.from_numpy(logits).double().log_softmax(-1).topk(count)
    pairs = [(int(token), float(value)) for value, token in zip(*expected, strict=True) if value > -np.inf]
    actual = likeliest_tokens(logits, count)
    assert [item.token_id for item in actual] == [token for token, _ in pairs]
    assert [item.logprob for item in actual] == pytest.approx([value for _, value in pairs], rel=1e-12)


def test_of_equals_the_lower_ids_come_first_and_masked_tokens_do_not_count():
    logits = np.asarray([1, 5, 5, -np.inf, 5, 1], np.float32)
    assert [item.token_id for item in likeliest_tokens(logits, 2)] == [1, 2]
    assert [item.token_id for item in likeliest_tokens(logits, 4)] == [1, 2, 4, 0]
    assert [item.token_id for item in likeliest_tokens(logits, 99)] == [1, 2, 4, 0, 5]


def test_log_probabilities_are_those_of_the_unmodified_logits():
    sampler = make_sampler(temperature=0.2, top_k=1, logit_bias={3: 50.0})
    inspection = inspect_choice(LOGITS, [0, 2], sampler, 3, 2)
    assert inspection.chosen == TokenLogprob(3, pytest.approx(np.log(0.05), rel=1e-6))
    assert inspection.alternatives == likeliest_tokens(LOGITS, 2)


def test_an_example_step_by_step():
    sampler = make_sampler(
        logit_bias={3: -np.inf}, repetition_penalty=2.0, top_k=3, top_p=0.8, min_p=0.9, presence_penalty=1.0
    )
    # The penalty squares the probability of token 4, which is in the prompt.
    effects = effects_of(inspect_choice(LOGITS, [4], make_sampler(repetition_penalty=2.0), 4, 5))
    assert effects["repetition_penalty"].changed
    assert effects["repetition_penalty"].chosen_probability == pytest.approx(0.0225 / 0.8725, rel=1e-6)

    inspection = inspect_choice(LOGITS, [99], sampler, 0, 1)
    effects = effects_of(inspection)
    bias, top_k, top_p, min_p = (effects[name] for name in ("logit_bias", "top_k", "top_p", "min_p"))
    assert (bias.num_removed, bias.num_left) == (1, 4)
    assert bias.removed == (TokenProbability(3, pytest.approx(0.05, rel=1e-6)),)
    assert bias.likeliest == TokenProbability(0, pytest.approx(0.4 / 0.95, rel=1e-6))
    assert top_k.removed == (TokenProbability(1, pytest.approx(0.1 / 0.95, rel=1e-6)),)
    assert top_k.chosen_probability == pytest.approx(0.4 / 0.85, rel=1e-6)
    assert top_p.removed == (TokenProbability(4, pytest.approx(0.15 / 0.85, rel=1e-6)),)
    assert min_p.removed == (TokenProbability(2, pytest.approx(0.3 / 0.7, rel=1e-6)),)
    assert (min_p.num_left, min_p.likeliest, min_p.chosen_probability) == (1, TokenProbability(0, 1.0), 1.0)
    # Off: eos_ban, typical_p. On, but nothing of the text is in the vocabulary: the penalties.
    unchanged = [step.name for step in inspection.steps if not step.changed]
    assert unchanged == [
        "sequence_bias", "begin_suppress", "eos_ban", "encoder_repetition_penalty", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "dry", "temperature", "top_n_sigma", "typical_p", "xtc", "mirostat",
    ]  # fmt: skip
    assert all(effects[name].num_removed == 0 and effects[name].removed == () for name in unchanged)


def test_a_token_that_was_removed_has_no_probability_from_there_on():
    steps = inspect_choice(LOGITS, [], make_sampler(top_k=2), 1, 3).steps
    is_possible = {step.name: step.chosen_probability > 0 for step in steps}
    assert [name for name, possible in is_possible.items() if not possible] == [
        "top_k", "top_p", "min_p", "typical_p", "xtc", "mirostat",
    ]  # fmt: skip


def test_greedy_shows_the_steps_it_takes():
    inspection = inspect_choice(LOGITS, [0], make_sampler(temperature=0, presence_penalty=1, top_k=1), 2, 3)
    assert [step.name for step in inspection.steps] == [
        "logit_bias", "sequence_bias", "begin_suppress", "eos_ban", "encoder_repetition_penalty",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "dry",
    ]  # fmt: skip
    assert effects_of(inspection)["presence_penalty"].likeliest.token_id == 2


@pytest.mark.parametrize("count", [0, 2, 50])
def test_effects_are_the_differences_between_the_stages_of_the_chain(count):
    token_id = choose(EVERY_LOGITS, EVERY_HISTORY, EVERY_STEP).token_id
    inspection = inspect_choice(EVERY_LOGITS, EVERY_HISTORY, EVERY_STEP, token_id, count)
    stages = [
        (name, dict(zip(token_ids.tolist(), torch.from_numpy(scores).softmax(-1).tolist(), strict=True)))
        for name, (token_ids, scores) in run_steps(EVERY_LOGITS, EVERY_HISTORY, EVERY_STEP)
    ]
    assert len(inspection.steps) == len(stages) - 1
    for effect, (_, before), (name, after) in zip(inspection.steps, stages, stages[1:], strict=False):
        removed = sorted(set(before) - set(after), key=lambda token, before=before: -before[token])
        assert (effect.name, effect.num_removed, effect.num_left) == (name, len(removed), len(after))
        assert [item.token_id for item in effect.removed] == removed[:count]
        assert [item.probability for item in effect.removed] == pytest.approx([before[t] for t in removed[:count]])
        likeliest = max(after, key=after.get)
        assert effect.likeliest == TokenProbability(likeliest, pytest.approx(after[likeliest]))
        assert effect.chosen_probability == pytest.approx(after[token_id])


def test_unusable_logits_are_refused_here_too():
    with pytest.raises(CheckpointError, match="NaN logits at position 2"):
        inspect_choice(np.asarray([0, np.nan], np.float32), [1, 1], make_sampler(), 0, 3)
