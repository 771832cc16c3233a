"""The sampler chain: from one row of logits to one token id, a pure function without state.

Order:

    schema -> logit_bias -> sequence_bias -> begin_suppress -> eos_ban
    -> encoder_repetition_penalty -> repetition_penalty -> presence_penalty -> frequency_penalty -> dry
    -> temperature -> top_n_sigma -> top_k -> top_p -> min_p -> typical_p -> xtc -> mirostat -> draw

- Steps that transformers has are in its order, so that a model's generation_config means what its author tuned.
  (llama.cpp applies the temperature last, so that it does not change what the filters cut off. `Sampler.order` sorts
  the filters differently or leaves some out.)
- The schema comes first, so that every step sees only allowed tokens. It runs if a mask is given.
- The biases come next, as in llama.cpp: the penalties weigh the biased score.
- Bans come before everything that counts candidates, so that top_k = 1 finds another token when the likeliest is
  banned. transformers bans bad words, the end and suppressed tokens after the repetition penalties, with the same
  result.
- Presence and frequency penalty follow the repetition penalties, whose factor depends on a score's sign, and DRY
  follows all of them: vLLM's and llama.cpp's order.
- Top-n-sigma comes next to the temperature, which scales distances and their deviation alike, and sees all candidates.
- XTC comes after the other filters, as its author wants: it keeps the least likely of the *viable* tokens, and what
  the other filters remove is not viable. Its threshold is a probability after temperature and filters.
- Mirostat is last in every order: it is moved by the surprise of what it kept. llama.cpp runs only bias and temperature
  before it; here the other steps are as they are set.

At temperature 0 only the steps up to DRY run, and the highest score is taken; if scores tie, the lowest token id. The
filters do not run, nor does XTC: greedy text means the likeliest token, and must not depend on the seed.

At `forced_eos_position` one step, forced_eos, replaces all from logit_bias to DRY.

Only mirostat depends on more than the history: on mu, one number. It is an argument and a result like any other,
`Sampler.mirostat_mu` and `Choice.mirostat_mu`, so that the chain stays a function: the same logits, history and
Sampler, with mu, give the same token and the same next mu. A caller that draws token after token passes mu on, and for
the first token of a text None, which means 2 * tau. A runner does so from `decode` to the end of its stream, and
`Runner.mirostat_mu` returns the latest; to roll back or start another stream, pass the mu of that position.

Each step sees the survivors of the one before. Scores are float64: steps and noise then agree between devices to
about 1e-14, so a CPU and a GPU draw the same token from the same logits, except with a chance of that order. No
result depends on the order of the candidates, beyond the rounding of the sums in dynamic temperature, top_n_sigma,
top_p, typical_p, xtc and mirostat.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.sampling import penalties
from llmcli.sampling.candidates import LARGEST_SCORE, Candidates, History, TokenMask, gather_candidates, schema
from llmcli.sampling.params import Sampler, SamplingParams

# Random numbers as a function, not a state: Philox4x32-10 keyed by (seed, sample index, position, token id).
#
# These four numbers give the same noise on any device, in any order, alone or in a batch. The counter is (token_id,
# position, sample_index, purpose), so that numbers for different purposes never coincide. Source: Salmon, Moraes, Dror,
# Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the Random123 library).

NUM_ROUNDS = 10
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
KEY_STEP_0 = 0x9E3779B9  # 2^32 / golden ratio: added to the key after each round
KEY_STEP_1 = 0xBB67AE85  # 2^32 * (sqrt(3) - 1)
WORD_MASK = 0xFFFFFFFF
WORD_BITS = np.uint64(32)

# The last word of the counter.
PURPOSE_NOISE = 0  # Gumbel noise, one number per token
PURPOSE_XTC = 1  # whether XTC acts, one number per position: token_id is 0

LARGEST_UNIFORM = 1.0 - 2.0**-53  # the largest double below 1

Integers = int | NDArray[np.integer]
Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Turn every counter into four random words with ten rounds of Philox; a word is 32 bits held in a uint64.

    Shapes: the four words of `counter` broadcast against each other; each word of the result has the common shape.
    Source: Salmon et al. 2011, section 3.3; Random123's philox.h.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(NUM_ROUNDS):
        # Both factors have 32 bits, so the 64-bit products never overflow.
        product_0 = word_0 * MULTIPLIER_0
        product_1 = word_2 * MULTIPLIER_1
        word_0 = (product_1 >> WORD_BITS) ^ word_1 ^ np.uint64(key_0)
        word_1 = product_1 & np.uint64(WORD_MASK)
        word_2 = (product_0 >> WORD_BITS) ^ word_3 ^ np.uint64(key_1)
        word_3 = product_0 & np.uint64(WORD_MASK)
        key_0 = (key_0 + KEY_STEP_0) & WORD_MASK
        key_1 = (key_1 + KEY_STEP_1) & WORD_MASK
    return word_0, word_1, word_2, word_3


def random_bits(
    seed: int, sample_index: Integers, position: Integers, token_ids: Integers, purpose: int = PURPOSE_NOISE
) -> Words:
    """Return 64 random bits for each token: words 0 (low) and 1 (high) of Philox4x32-10.

    The key is (low, high half of `seed`), the counter (token_id, position, sample_index, purpose).

    Why 64 bits: the smallest uniform number wins, and the smallest of 128k is near 2^-17. With 24 bits that is
    128 steps of the grid, so the winner's noise is coarse by 1 %, and two or so of the 128k always coincide; with 32
    bits they do in 85 % of draws. Tokens of equal score then tie, and the lower id gains. With 64 bits the
    chance of a coincidence is 4e-10.

    Shapes: sample_index, position and token_ids broadcast; the result has their common shape, uint64.
    Units: seed below 2^64; the others below 2^32.
    """
    counter = (
        np.asarray(token_ids, np.uint64),
        np.asarray(position, np.uint64),
        np.asarray(sample_index, np.uint64),
        np.asarray(purpose, np.uint64),
    )
    low, high, _, _ = philox4x32(counter, (seed & WORD_MASK, seed >> 32))
    return low | (high << WORD_BITS)


def gumbel_from_bits(bits: Words) -> NDArray[np.float64]:
    """Map 64 random bits to Gumbel noise -log(-log(1 - u)) with u = (bits + 1/2) / 2^64.

    -log1p(-u) is an exponential variable. The smallest one wins the race, and near 0 u has full relative precision,
    so the winner's noise is exact where -log(u), its mirror image, would be coarse. The noise lies in [-3.7, 45.1].

    Shapes: the result has the shape of `bits`, float64.
    """
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-64
    # The topmost 2^10 values round to u = 1, whose exponential is infinite.
    exponential = -np.log1p(-np.minimum(uniform, LARGEST_UNIFORM))
    noise: NDArray[np.float64] = -np.log(exponential)
    return noise


def gumbel(seed: int, sample_index: Integers, position: Integers, token_ids: Integers) -> NDArray[np.float64]:
    """Return the Gumbel noise of each token; arguments, shapes and units as in `random_bits`."""
    return gumbel_from_bits(random_bits(seed, sample_index, position, token_ids))


def uniform(seed: int, sample_index: Integers, position: Integers) -> NDArray[np.float64]:
    """Return XTC's number for each position, uniform in [0, 1): the upper 53 of 64 random bits.

    Shapes and units as in `random_bits`.
    """
    bits = random_bits(seed, sample_index, position, 0, PURPOSE_XTC)
    number: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return number


# The steps of a draw at a temperature above 0: the temperature itself, and six filters that remove candidates.
#
# Each keeps at least one candidate and returns them unchanged if its parameter is off.


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


class Choice(NamedTuple):
    """A chosen token; its log-probability under the unmodified logits, if requested; mirostat's next mu."""

    token_id: int
    logprob: float | None
    mirostat_mu: float | None


class ChainStep(NamedTuple):
    """One step of the chain; `apply` returns its candidates unchanged if its parameter is off."""

    name: str
    apply: Callable[[Candidates, Sampler, History], Candidates]


PENALTIES = (
    ChainStep("logit_bias", penalties.logit_bias),
    ChainStep("sequence_bias", penalties.sequence_bias),
    ChainStep("begin_suppress", penalties.begin_suppress),
    ChainStep("eos_ban", penalties.eos_ban),
    ChainStep("encoder_repetition_penalty", penalties.encoder_repetition_penalty),
    ChainStep("repetition_penalty", penalties.repetition_penalty),
    ChainStep("presence_penalty", penalties.presence_penalty),
    ChainStep("frequency_penalty", penalties.frequency_penalty),
    ChainStep("dry", penalties.dry),
)
FILTERS = (
    ChainStep("temperature", temperature),
    ChainStep("top_n_sigma", top_n_sigma),
    ChainStep("top_k", top_k),
    ChainStep("top_p", top_p),
    ChainStep("min_p", min_p),
    ChainStep("typical_p", typical_p),
    ChainStep("xtc", xtc),
    ChainStep("mirostat", mirostat),
)
FORCED_EOS = ChainStep("forced_eos", penalties.forced_eos)
_FILTERS_BY_NAME = {step.name: step for step in FILTERS}


def steps_of(sampler: Sampler, position: int) -> tuple[ChainStep, ...]:
    """Return the steps of a choice at `position`."""
    is_forced = bool(sampler.forced_eos_token_ids) and position == sampler.forced_eos_position
    before = (FORCED_EOS,) if is_forced else PENALTIES
    if sampler.params.temperature == 0:
        return before
    return (*before, *(_FILTERS_BY_NAME[name] for name in sampler.order))


def run_steps(
    logits: NDArray[np.float32], history: History, sampler: Sampler, mask: TokenMask | None = None
) -> Iterator[tuple[str, Candidates]]:
    """Yield `logits` and then each step's name, with the candidates left after it.

    Shapes and errors as in `choose`.
    """
    candidates = gather_candidates(logits, len(history))
    yield "logits", candidates
    if mask is not None:
        candidates = schema(candidates, mask, len(history))
        yield "schema", candidates
    for step in steps_of(sampler, len(history)):
        candidates = step.apply(candidates, sampler, history)
        yield step.name, candidates


def draw(candidates: Candidates, sampler: Sampler, position: int) -> int:
    """Draw a token with the probabilities of the scores; at temperature 0 take the highest score.

    Score plus Gumbel noise is highest for token i with probability exp(score_i) / sum_j exp(score_j). The noise
    depends only on (seed, sample_index, position, token_id), so nothing else in the batch can change the draw.
    A walk along a cumulative sum would need a sort, and an order of summation that all devices share.
    Source: Gumbel 1954; Maddison, Tarlow, Minka, "A* sampling", NIPS 2014, section 2.
    """
    race = candidates.scores
    if sampler.params.temperature > 0:
        race = race + gumbel(sampler.seed, sampler.sample_index, position, candidates.token_ids)
    return int(candidates.token_ids[race == race.max()].min())


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the natural logarithm of the model's own probability of each token (log-softmax of logits).

    It comes before bias, penalties, temperature and filters, so it measures the model, and compares between settings.
    Shapes: logits [..., vocab_size] float32; result of that shape, float64.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def choose(
    logits: NDArray[np.float32],
    history: History,
    sampler: Sampler,
    with_logprob: bool = False,
    mask: TokenMask | None = None,
) -> Choice:
    """Choose the token that follows `history`, the ids of the prompt and of all tokens generated so far.

    The history's length is the position of the chosen token and part of the key of the noise. The log-probability
    costs a pass of exponentials over the vocabulary, so it is computed only on request.

    Shapes: logits [vocab_size] float32; history [position] integers; mask as `TokenMask`, all tokens without one.
    Raises: CheckpointError for logits with NaN or +inf, or all -inf; UsageError if mask, bias and bans leave no token.
    """
    *_, (_, candidates) = run_steps(logits, history, sampler, mask)
    token_id = draw(candidates, sampler, len(history))
    logprob = float(log_probabilities(logits)[token_id]) if with_logprob else None
    return Choice(token_id, logprob, next_mu(candidates, sampler, token_id))
