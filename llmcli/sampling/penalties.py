"""The steps before the filters: biases and bans, and five penalties on what prompt and text already contain.

They change scores, also for a greedy choice. Each returns its candidates unchanged if its parameter is off.
Shapes, of every step: history [position] integers, the ids of prompt and generated text.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.sampling.candidates import LARGEST_SCORE, Candidates, History
from llmcli.sampling.params import Sampler

# Longer repetitions count as equal: at base 1.75 the penalty is 10^15 times the multiplier by then. The bound keeps DRY
# linear in the length of a text that is one long loop.
MAX_DRY_EXPONENT = 64


def logit_bias(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Add the sampler's bias to the scores it names; -inf removes a token.

    Source: OpenAI's `logit_bias`; transformers' SequenceBiasLogitsProcessor with sequences of one token.
    Raises: UsageError if no candidate is left.
    """
    return _add_biases(candidates, sampler.logit_bias, "logit bias bans", history)


def sequence_bias(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Add each sequence's bias to the score of its last token, if the history ends in the tokens before that.

    Source: transformers' SequenceBiasLogitsProcessor, and with -inf its NoBadWordsLogitsProcessor.
    Raises: UsageError if no candidate is left.
    """
    if not sampler.sequence_bias:
        return candidates
    longest = max(len(token_ids) for token_ids, _ in sampler.sequence_bias) - 1
    recent = tuple(_tail(history, longest).tolist()) if longest else ()
    ends = {length: recent[len(recent) - length :] for length in range(len(recent) + 1)}
    amounts: dict[int, float] = {}
    for token_ids, amount in sampler.sequence_bias:
        if ends.get(len(token_ids) - 1) == token_ids[:-1]:
            amounts[token_ids[-1]] = amounts.get(token_ids[-1], 0.0) + amount
    return _add_biases(candidates, amounts, "sequence bias bans", history)


def begin_suppress(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Remove the tokens that must not be the first of the generated ones.

    Source: transformers' SuppressTokensAtBeginLogitsProcessor.
    Raises: UsageError if no candidate is left.
    """
    if not sampler.begin_suppress_token_ids or len(history) != sampler.num_prompt_tokens:
        return candidates
    return _ban(candidates, sampler.begin_suppress_token_ids, "begin_suppress_tokens bans", history)


def forced_eos(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep only the forced tokens, all equally likely: the one step before the filters at `forced_eos_position`.

    Source: transformers' ForcedEOSTokenLogitsProcessor, which overwrites what biases and penalties did.
    Raises: UsageError if no candidate is left.
    """
    kept = candidates.keep(candidates.occurrences(np.fromiter(sampler.forced_eos_token_ids, np.int64)) > 0)
    _check_any_left(kept.token_ids >= 0, "forced_eos_token_id excludes", history)
    return Candidates(kept.token_ids, np.zeros(len(kept.scores)))


def eos_ban(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Remove the tokens that end a text: before min_new_tokens are generated, or always with ignore_eos.

    Source: transformers' MinNewTokensLengthLogitsProcessor; llama.cpp's --ignore-eos.
    Raises: UsageError if no candidate is left.
    """
    num_new_tokens = len(history) - sampler.num_prompt_tokens
    is_active = sampler.ignore_eos or num_new_tokens < sampler.params.min_new_tokens
    if not (is_active and sampler.eos_token_ids):
        return candidates
    return _ban(candidates, sampler.eos_token_ids, "min_new_tokens or ignore_eos bans", history)


def encoder_repetition_penalty(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Multiply the positive and divide the negative scores of all tokens of the prompt.

    Source: transformers' EncoderRepetitionPenaltyLogitsProcessor, for which a decoder's prompt is the encoder's input;
    it takes the penalty's inverse first, and so does this.
    """
    strength = sampler.params.encoder_repetition_penalty
    if strength == 1:
        return candidates
    return _weaken(candidates, np.asarray(history[: sampler.num_prompt_tokens], np.int64), 1 / strength)


def repetition_penalty(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Divide the positive and multiply the negative scores of all tokens in the window of prompt and generated text.

    Source: arXiv 1909.05858 section 4.1, with the sign rule of transformers' RepetitionPenaltyLogitsProcessor.
    """
    penalty = sampler.params.repetition_penalty
    if penalty == 1:
        return candidates
    return _weaken(candidates, _tail(history, sampler.params.penalty_window), penalty)


def presence_penalty(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Subtract the penalty from the score of every token in the window of generated text.

    Source: OpenAI's API, which counts sampled tokens, as vLLM does. A penalty on the prompt as well, as in llama.cpp,
    would keep a summary from using its subject's own words.
    """
    penalty = sampler.params.presence_penalty
    if penalty == 0:
        return candidates
    return _add(candidates, -penalty * (_generated_occurrences(candidates, sampler, history) > 0))


def frequency_penalty(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Subtract the penalty from a token's score once for each time the window of generated text holds it.

    Source: as for `presence_penalty`.
    """
    penalty = sampler.params.frequency_penalty
    if penalty == 0:
        return candidates
    return _add(candidates, -penalty * _generated_occurrences(candidates, sampler, history))


def dry(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Penalise the tokens that would lengthen a verbatim repetition (DRY, "don't repeat yourself").

    If the text ends in L tokens that also occur earlier, the token that followed there loses multiplier * base^(L -
    allowed_length), for the longest such L >= allowed_length. A breaker ends the L tokens and is never penalised.

    Source: text-generation-webui, pull request 5677; llama.cpp's llama_sampler_dry_apply.
    """
    params = sampler.params
    if params.dry_multiplier == 0 or len(history) <= max(1, params.dry_allowed_length):  # too short for a repetition
        return candidates
    recent = _tail(history, params.dry_window)
    breakers = sampler.dry_breaker_token_ids
    lengths = repetition_lengths(recent, breakers, params.dry_allowed_length + MAX_DRY_EXPONENT)
    longest = np.zeros(max(candidates.token_ids.max(), recent.max()) + 1, np.int64)
    np.maximum.at(longest, recent[1:], lengths)
    longest[[token_id for token_id in set(recent.tolist()) if token_id in breakers]] = 0
    excess = longest[candidates.token_ids] - params.dry_allowed_length
    is_penalized = excess >= 0
    amounts = np.zeros(len(excess))
    with np.errstate(over="ignore"):  # absurd bases overflow, and are then clipped
        amounts[is_penalized] = -params.dry_multiplier * np.power(params.dry_base, excess[is_penalized])
    return _add(candidates, amounts)


def repetition_lengths(recent: NDArray[np.int64], breakers: frozenset[int], max_length: int) -> NDArray[np.int64]:
    """Return for each earlier place how many tokens up to it equal the last tokens of the text, up to max_length.

    One comparison per place and length; all places are independent.
    Shapes: recent [num_tokens] int64, num_tokens >= 1; result [num_tokens - 1] int64.
    """
    lengths = np.zeros(len(recent) - 1, np.int64)
    places = np.arange(len(recent) - 1)
    for length in range(1, min(max_length, len(places)) + 1):
        token_id = recent[-length]
        if token_id in breakers:
            break
        places = places[places >= length - 1]
        places = places[recent[places - length + 1] == token_id]
        lengths[places] = length
    return lengths


def _tail(history: History, window: int) -> NDArray[np.int64]:
    """The last `window` tokens of the history, or all of them if the window is 0."""
    return np.asarray(history[max(len(history) - window, 0) :] if window else history, np.int64)


def _generated_occurrences(candidates: Candidates, sampler: Sampler, history: History) -> NDArray[np.int32]:
    """How often each candidate [num_candidates] was generated within the penalty window."""
    generated = np.asarray(history[sampler.num_prompt_tokens :], np.int64)
    return candidates.occurrences(_tail(generated, sampler.params.penalty_window))


def _weaken(candidates: Candidates, token_ids: NDArray[np.int64], penalty: float) -> Candidates:
    """Divide the positive and multiply the negative scores of the tokens [any] by a penalty > 0."""
    seen = candidates.occurrences(token_ids) > 0
    penalized = candidates.scores[seen]
    # Absurd penalties overflow, and are then clipped; if one is infinite, 0 * inf is computed but not chosen.
    with np.errstate(over="ignore", invalid="ignore"):
        penalized = np.where(penalized < 0, penalized * penalty, penalized / penalty)
    scores = candidates.scores.copy()
    scores[seen] = np.clip(penalized, -LARGEST_SCORE, LARGEST_SCORE)
    return Candidates(candidates.token_ids, scores)


def _add_biases(candidates: Candidates, biases: Mapping[int, float], what_bans: str, history: History) -> Candidates:
    """Add to each score the bias of its token; -inf removes it."""
    if not biases:
        return candidates
    num_ids = int(candidates.token_ids.max()) + 1
    table = np.zeros(num_ids)
    for token_id, amount in biases.items():
        if token_id < num_ids:
            table[token_id] = amount
    bias = table[candidates.token_ids]
    is_allowed = bias > -np.inf
    _check_any_left(is_allowed, what_bans, history)
    return _add(candidates.keep(is_allowed), bias[is_allowed])


def _ban(candidates: Candidates, token_ids: frozenset[int], what_bans: str, history: History) -> Candidates:
    is_allowed = candidates.occurrences(np.fromiter(token_ids, np.int64)) == 0
    _check_any_left(is_allowed, what_bans, history)
    return candidates.keep(is_allowed)


def _add(candidates: Candidates, amounts: NDArray[np.floating]) -> Candidates:
    """Add an amount [num_candidates] to each score; infinite ones are clipped to the largest score."""
    return Candidates(candidates.token_ids, np.clip(candidates.scores + amounts, -LARGEST_SCORE, LARGEST_SCORE))


def _check_any_left(is_allowed: NDArray[np.bool_], what_bans: str, history: History) -> None:
    if not is_allowed.any():
        raise UsageError(
            f"{what_bans} every remaining token at position {len(history)}, expected at least one to choose: "
            "ban fewer tokens"
        )
