"""Rows of logits, and the expected result of each step, computed without the code under test."""

import math

import numpy as np
import pytest
import torch

from llmcli.sampling import chain
from llmcli.sampling.candidates import gather_candidates
from llmcli.sampling.params import SPECS, Sampler, SamplingParams

OFF = {"temperature": 1.0, "top_p": 1.0}  # all other parameters are off by default
NO_HISTORY = np.zeros(0, np.int64)

# Every step is on, and in the history below each of them changes something, except two that act at one position.
EVERY_STEP = Sampler(
    SamplingParams(
        temperature=1.3, top_k=28, top_p=0.96, min_p=0.12, typical_p=0.9, xtc_probability=0.4, xtc_threshold=0.08,
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, penalty_window=9, dry_multiplier=0.8,
        dry_window=11, min_new_tokens=20, encoder_repetition_penalty=1.4, dynatemp_range=0.3, dynatemp_exponent=1.5,
        top_n_sigma=2.8, mirostat_tau=2.5, mirostat_eta=0.2,
    ),
    seed=42, num_prompt_tokens=5, eos_token_ids=frozenset({12}), logit_bias={8: 1.0, 20: -1.5, 33: -np.inf},
    sequence_bias=(((17, 8, 9), 0.5), ((8, 9), 0.25), ((8, 21), -np.inf), ((17, 9), 4.0)),
    dry_breaker_token_ids=frozenset({2}), mirostat_mu=4.6,
)  # fmt: skip
EVERY_HISTORY = [3, 17, 8, 30, 3, 2, 17, 8, 25, 30, 17, 8, 31, 6, 17, 8]
EVERY_LOGITS = np.random.default_rng(7).standard_normal(40).astype(np.float32) * 1.5


def make_sampler(**settings):
    """A sampler with all steps off, except the given parameters and fields."""
    params = {name: value for name, value in settings.items() if name in SPECS}
    others = {name: value for name, value in settings.items() if name not in SPECS}
    return Sampler(SamplingParams(**(OFF | params)), **({"seed": 0} | others))


def apply_step(name, logits, history=NO_HISTORY, **settings):
    """One step on all candidates of the logits, as (token ids, scores)."""
    step = next(step for step in (*chain.PENALTIES, chain.FORCED_EOS, *chain.FILTERS) if step.name == name)
    return step.apply(gather_candidates(logits, 0), make_sampler(**settings), history)


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


KINDS = ["normal", "ties", "masked", "spike", "huge", "flat"]
VOCAB_SIZES = [50, 1000, 32_000]
every_row = pytest.mark.parametrize(
    "logits", [make_logits(kind, size) for kind in KINDS for size in VOCAB_SIZES],
    ids=[f"{kind}-{size}" for kind in KINDS for size in VOCAB_SIZES],
)  # fmt: skip


def survivors_of(scores):
    return np.flatnonzero(scores > -np.inf)


def reference_scores(processor, scores, history=NO_HISTORY):
    """The result of a transformers processor for one row of scores, float64 [vocab_size]."""
    return processor(torch.from_numpy(np.asarray(history))[None], torch.from_numpy(scores)[None].clone())[0].numpy()


def last(history, window):
    """The last `window` tokens, 0 for all."""
    return list(history)[-window:] if window else list(history)


def presence_and_frequency(generated, presence, frequency):
    """OpenAI's formula, as the change of a token's logit: -c[j] * frequency - float(c[j] > 0) * presence."""
    generated = list(generated)
    return {token: -generated.count(token) * frequency - presence for token in set(generated)}


def dry_penalties(history, multiplier, base, allowed_length, breakers=()):
    """DRY by its description: each length of each earlier copy of the text's end, one after the other."""
    history = list(history)
    longest = {}
    for following in range(1, len(history)):
        for length in range(1, following + 1):
            copy, end = history[following - length : following], history[len(history) - length :]
            if copy == end and not set(end) & set(breakers):
                token = history[following]
                longest[token] = max(length, longest.get(token, 0))
    return {
        token: multiplier * base ** (length - allowed_length)
        for token, length in longest.items()
        if length >= allowed_length and token not in breakers
    }


def softmax(scores):
    """Probabilities of a dict from token to score."""
    highest = max(scores.values())
    weights = {token: math.exp(score - highest) for token, score in scores.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def top_n_sigma_kept(scores, n):
    """llama.cpp's llama_sampler_top_n_sigma_apply, on a dict from token to score: which tokens stay."""
    finite = [score for score in scores.values() if score != -math.inf]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((score - mean) ** 2 for score in finite) / len(finite))
    cut = max(finite) - n * sigma
    return {token for token, score in scores.items() if not score < cut}


def dynamic_temperature(scores, temperature, reach, exponent):
    """llama.cpp's llama_sampler_temp_ext_apply, on a dict from token to score: the temperature that it divides by."""
    lowest, highest = max(0.0, temperature - reach), temperature + reach
    most = -math.log(1 / len(scores))
    entropy = math.fsum(-p * math.log(p) for p in softmax(scores).values() if p > 0)
    return lowest + (highest - lowest) * (entropy / most) ** exponent


def mirostat_kept(scores, mu):
    """llama.cpp's llama_sampler_mirostat_v2_apply, on a dict from token to score: the tokens up to the first surprise
    above mu, at least one."""
    surprises = {token: -math.log2(p) if p > 0 else math.inf for token, p in softmax(scores).items()}
    by_surprise = sorted(scores, key=surprises.get)
    size = next((index for index, token in enumerate(by_surprise) if surprises[token] > mu), len(scores))
    return set(by_surprise[: max(size, 1)])


def mirostat_next_mu(kept_scores, token, mu, tau, eta):
    """llama.cpp's change of mu after the draw of `token` from the tokens that are left."""
    return mu - eta * (-math.log2(softmax(kept_scores)[token]) - tau)


def xtc_excluded(probabilities, threshold):
    """The tokens that XTC removes when it acts, of a dict from token to probability without ties."""
    viable = sorted((token for token in probabilities if probabilities[token] >= threshold), key=probabilities.get)
    return set(viable[1:])
