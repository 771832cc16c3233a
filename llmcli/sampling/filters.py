"""The steps of a draw at a temperature above 0: the temperature itself, and six filters that remove candidates.

Each keeps at least one candidate and returns them unchanged if its parameter is off.
"""

import math
import sys
from collections.abc import Iterable

import numpy as np

from llmcli.sampling.candidates import LARGEST_SCORE, Candidates, History
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.sampling.philox import uniform


def temperature(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Divide the scores by the temperature, after moving the highest to 0, which changes no probability.

    At a temperature of 0, which here only a dynamic one reaches, only the highest keep any probability.
    Source: transformers' TemperatureLogitsWarper; without the move, a tiny temperature overflows.
    """
    divisor = dynamic_temperature(candidates, sampler.params)
    scores = candidates.scores - candidates.scores.max()
    if divisor == 0:
        return Candidates(candidates.token_ids, np.where(scores == 0, 0.0, -np.inf))
    with np.errstate(over="ignore"):  # far below the highest a score may become -inf: its probability is 0
        return Candidates(candidates.token_ids, np.divide(scores, divisor, out=scores))


def dynamic_temperature(candidates: Candidates, params: SamplingParams) -> float:
    """Return low + (high - low) * (H / ln n)^exponent: H is the entropy in nats of the n candidates' probabilities.

    low is temperature - range, at least 0, and high is temperature + range. Without a range, or for a single
    candidate, whose entropy says nothing, the result is the temperature.
    Source: llama.cpp's llama_sampler_temp_ext.
    """
    num_candidates = len(candidates.scores)
    if params.dynatemp_range == 0 or num_candidates == 1:
        return params.temperature
    low = max(params.temperature - params.dynatemp_range, 0.0)
    high = min(params.temperature + params.dynatemp_range, sys.float_info.max)
    probabilities = candidates.probabilities()
    probabilities = probabilities[probabilities > 0]  # 0 * -inf is NaN
    entropy = -float((probabilities * np.log(probabilities)).sum())
    doubt = min(max(entropy / math.log(num_candidates), 0.0), 1.0)
    return low + (high - low) * float(doubt**params.dynatemp_exponent)


def top_n_sigma(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep scores of at least the highest minus n times the standard deviation of all finite ones.

    Source: arXiv 2411.07641; llama.cpp's llama_sampler_top_n_sigma.
    """
    n = sampler.params.top_n_sigma
    if n == 0:
        return candidates
    scores = candidates.scores - candidates.scores.max()
    finite = scores[scores > -np.inf]
    largest = max(-float(finite.min()), 1.0)  # so that no square overflows
    sigma = float((finite / largest).std()) * largest  # of the population: divided by n, not n - 1
    return candidates.keep(scores >= -n * sigma)


def top_k(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the k highest scores, and all that tie with the lowest of them.

    Source: arXiv 1805.04833 section 5.4; transformers' TopKLogitsWarper.
    """
    k = sampler.params.top_k
    num_candidates = len(candidates.scores)
    if not 0 < k < num_candidates:
        return candidates
    # A partial sort: 0.2 ms against 3.2 ms for a sort of 128,256 scores.
    threshold = np.partition(candidates.scores, num_candidates - k)[num_candidates - k]
    return candidates.keep(candidates.scores >= threshold)


def top_p(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the fewest most probable tokens whose probabilities sum to at least p; of equal ones the lower ids first.

    Source: arXiv 1904.09751 section 3.1; transformers' TopPLogitsWarper, which leaves the order of equal ones open.
    """
    p = sampler.params.top_p
    if p == 1:
        return candidates
    scores = candidates.scores
    weights = candidates.weights()
    total = weights.sum()
    # Tokens less probable than (1 - p) / n sum to less than 1 - p, so the others reach p without them: of 128,256
    # tokens with a natural distribution about 18,000 are left to sort.
    is_heavy = weights >= (1 - p) / len(weights) * total
    descending = np.sort(scores[is_heavy])[::-1]
    mass = np.cumsum(np.exp(descending - descending[0]))
    # The token that crosses p; for p just below 1, rounding may put the end of `mass` below p * total.
    last = min(int(np.searchsorted(mass, p * total)), len(mass) - 1)
    kept = scores > descending[last]
    ties = np.flatnonzero(scores == descending[last])
    ties = ties[np.argsort(candidates.token_ids[ties])]
    kept[ties[: last + 1 - np.count_nonzero(kept)]] = True
    return candidates.keep(kept)


def min_p(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the tokens at least `min_p` times as probable as the most probable one.

    Source: arXiv 2407.01082 section 3; transformers' MinPLogitsWarper.
    """
    if sampler.params.min_p == 0:
        return candidates
    return candidates.keep(candidates.scores >= candidates.scores.max() + np.log(sampler.params.min_p))


def typical_p(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the tokens whose surprise -log(probability) is nearest to its mean, the entropy, until they sum to p.

    All that tie with the last of them stay too, so the order of the candidates does not matter.
    Source: arXiv 2202.00666; transformers' TypicalLogitsWarper.
    """
    if sampler.params.typical_p == 1:
        return candidates
    scores = candidates.scores
    probabilities = candidates.probabilities()
    is_possible = probabilities > 0  # 0 * -inf is NaN
    mean_score = (probabilities[is_possible] * scores[is_possible]).sum()
    # Surprise and entropy both differ from these by one constant, which cancels in their difference.
    distances = np.abs(scores - mean_score)
    by_distance = np.argsort(distances)
    mass = np.cumsum(probabilities[by_distance])
    last = min(int(np.searchsorted(mass, sampler.params.typical_p)), len(mass) - 1)
    return candidates.keep(distances <= distances[by_distance[last]])


def xtc(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """With probability `xtc_probability`, remove all tokens of at least the threshold except the least probable.

    If several tie for least probable, all of them stay. If a token that ends the text would be removed, nothing is, as
    in text-generation-webui: a text that can never end is not more creative. (That program also spares a newline,
    llama.cpp spares nothing.) One random number per position decides.

    Source: text-generation-webui, pull request 6335, "Exclude Top Choices".
    """
    params = sampler.params
    if params.xtc_probability == 0:
        return candidates
    if uniform(sampler.seed, sampler.sample_index, len(history)) >= params.xtc_probability:
        return candidates
    probabilities = candidates.probabilities()
    viable = probabilities[probabilities >= params.xtc_threshold]
    if len(viable) < 2:
        return candidates
    is_excluded = probabilities > viable.min()
    if not sampler.eos_token_ids.isdisjoint(candidates.token_ids[is_excluded].tolist()):
        return candidates
    return candidates.keep(~is_excluded)


# Mirostat 2: keeps the surprise of the text near `mirostat_tau`. The only step with a state, the bound mu.
#
# Units: surprises, tau and mu in bits. Source: arXiv 2007.14966 (Basu et al.), algorithm 2 of its second version;
# llama.cpp's llama_sampler_mirostat_v2.


def mirostat(candidates: Candidates, sampler: Sampler, history: History) -> Candidates:
    """Keep the tokens whose surprise -log2(probability) is at most mu; if there are none, the likeliest and its ties.

    With M the highest score, W the sum of exp(score - M): score >= M + min(ln W - mu * ln 2, 0).
    """
    if sampler.params.mirostat_tau == 0:
        return candidates
    highest = float(candidates.scores.max())
    cut = _log_sum(candidates) - current_mu(sampler) * math.log(2)
    return candidates.keep(candidates.scores >= highest + min(cut, 0.0))


def next_mu(candidates: Candidates, sampler: Sampler, token_id: int) -> float | None:
    """Return mu for the choice after that of `token_id` from `candidates`, which mirostat kept; None if it is off.

    It falls by eta times the excess of the token's surprise, among the kept ones, over tau.
    """
    if not _moves(sampler):
        return None
    score = float(candidates.scores[candidates.token_ids == token_id][0] - candidates.scores.max())
    return _moved(current_mu(sampler), sampler, (_log_sum(candidates) - score) / math.log(2))


def mu_behind(sampler: Sampler, probabilities: Iterable[float]) -> float | None:
    """Return mu after tokens that were drawn with these probabilities, above 0; None if mirostat is off."""
    if not _moves(sampler):
        return None
    mu = current_mu(sampler)
    for probability in probabilities:
        mu = _moved(mu, sampler, -math.log2(probability))
    return mu


def current_mu(sampler: Sampler) -> float:
    """Return mu before a draw: the sampler's, or 2 * tau at the first token of a text."""
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
