"""Mirostat 2: keeps the surprise of the text near `mirostat_tau`. The one step with a state, the bound mu.

Units: surprises, tau and mu in bits.
Source: arXiv 2007.14966 (Basu et al.), algorithm 2 of its second version; llama.cpp's llama_sampler_mirostat_v2.
"""

import math
from collections.abc import Iterable

from llmcli.sampling.candidates import LARGEST_SCORE, Candidates, History
from llmcli.sampling.params import Sampler


def mirostat(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the tokens whose surprise -log2(probability) is at most mu; if there are none, the likeliest and its equals.

    With M the highest score, W the sum of exp(score - M): score >= M + min(ln W - mu * ln 2, 0).
    """
    if sampler.params.mirostat_tau == 0:
        return candidates
    highest = float(candidates.scores.max())
    cut = _log_sum(candidates) - current_mu(sampler) * math.log(2)
    return candidates.keep(candidates.scores >= highest + min(cut, 0.0))


def next_mu(candidates: Candidates, sampler: Sampler, token_id: int) -> float | None:
    """Return mu for the choice after that of `token_id` from `candidates`, which mirostat kept; None if it is off.

    Lower by eta times the token's surprise among the kept ones beyond tau.
    """
    if not _moves(sampler):
        return None
    score = float(candidates.scores[candidates.token_ids == token_id][0] - candidates.scores.max())
    return _moved(current_mu(sampler), sampler, (_log_sum(candidates) - score) / math.log(2))


def mu_behind(sampler: Sampler, probabilities: Iterable[float]) -> float | None:
    """Return mu behind tokens that had these probabilities, above 0, when they were drawn; None if mirostat is off."""
    if not _moves(sampler):
        return None
    mu = current_mu(sampler)
    for probability in probabilities:
        mu = _moved(mu, sampler, -math.log2(probability))
    return mu


def current_mu(sampler: Sampler) -> float:
    """Return mu before a draw: what the sampler has, or 2 * tau at the first token of a text."""
    if sampler.mirostat_mu is not None:
        return sampler.mirostat_mu
    return min(2 * sampler.params.mirostat_tau, LARGEST_SCORE)


def _moves(sampler: Sampler) -> bool:
    return sampler.params.mirostat_tau != 0 and sampler.params.temperature != 0


def _moved(mu: float, sampler: Sampler, surprise: float) -> float:
    moved = mu - sampler.params.mirostat_eta * (surprise - sampler.params.mirostat_tau)
    return min(max(moved, -LARGEST_SCORE), LARGEST_SCORE)


def _log_sum(candidates: Candidates) -> float:
    """The natural logarithm of the sum of exp(score - highest score)."""
    return math.log(candidates.weights().sum())
