"""The sampler chain: from one row of logits to one token id, a pure function without state.

Order, the same as in Hugging Face transformers, so that a model's generation_config means what its author tuned:

    repetition_penalty -> temperature -> top_k -> top_p -> min_p -> draw

At temperature 0 it is repetition_penalty -> the highest score; wherever scores tie, the lowest token id wins.

Each step sees the survivors of the one before. Scores are float64: steps and noise then agree between devices to
about 1e-14, so a CPU and a GPU draw the same token from the same logits but for a chance of that order. No
result depends on the order of the candidates, beyond the rounding of the sum in top_p.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import CheckpointError, UsageError
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.philox import gumbel

History = Sequence[int] | NDArray[np.integer]

SEED_BITS = 64
SAMPLE_INDEX_BITS = 32

# Scores stay within this, so that the difference of any two of them is finite too.
LARGEST_SCORE = 1e300


@dataclass(frozen=True)
class Sampler:
    """All that decides a draw apart from logits and history: the parameters, the seed, and which sample this is.

    Raises: UsageError for a seed outside [0, 2^64) or a sample index outside [0, 2^32).
    """

    params: SamplingParams
    seed: int
    sample_index: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("seed", SEED_BITS), ("sample_index", SAMPLE_INDEX_BITS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
                raise UsageError(f"{name} is {value!r}, expected an integer >= 0 and < 2^{bits}")


class Candidates(NamedTuple):
    """The tokens that can still be chosen.

    Shapes: token_ids [num_candidates] int64, each once; scores [num_candidates] float64, natural logarithms of
    unnormalised probabilities. `choose` keeps them in ascending order of token id; no step relies on that.
    """

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float64]

    def keep(self, mask: NDArray[np.bool_]) -> "Candidates":
        """Return the candidates whose entry in `mask` [num_candidates] is true."""
        return Candidates(self.token_ids[mask], self.scores[mask])


class Choice(NamedTuple):
    """A chosen token and, if it was asked for, its `log_probability` under the unmodified logits."""

    token_id: int
    logprob: float | None


class Step(NamedTuple):
    """One link of the chain; `apply` returns its candidates unchanged where its parameter is off."""

    name: str
    apply: Callable[[Candidates, SamplingParams, History], Candidates]


def gather_candidates(logits: NDArray[np.float32], position: int) -> Candidates:
    """Return all tokens whose logit is above -inf, which marks a token that must not be chosen.

    Shapes: logits [vocab_size] float32.
    Raises: CheckpointError for NaN, +inf, or -inf everywhere: no sound model computes these.
    """
    highest = logits.max()  # NaN if there is any
    if not np.isfinite(highest):
        kind = "NaN" if np.isnan(highest) else "infinite" if highest > 0 else "only -inf"
        raise CheckpointError(
            f"the model produced {kind} logits at position {position}, expected finite numbers: "
            "its weights are damaged or overflow; download it again or run it with --dtype float32"
        )
    token_ids = np.flatnonzero(logits > -np.inf)
    return Candidates(token_ids, logits[token_ids].astype(np.float64))


def repetition_penalty(candidates: Candidates, params: SamplingParams, history: History) -> Candidates:
    """Divide the positive and multiply the negative scores of all tokens in prompt and generated text.

    Source: arXiv 1909.05858 section 4.1, with the sign rule of transformers' RepetitionPenaltyLogitsProcessor.
    """
    penalty = params.repetition_penalty
    if penalty == 1:
        return candidates
    seen = np.isin(candidates.token_ids, np.asarray(history, np.int64))
    penalized = candidates.scores[seen]
    with np.errstate(over="ignore"):  # absurd penalties overflow, and are then clipped
        penalized = np.where(penalized < 0, penalized * penalty, penalized / penalty)
    scores = candidates.scores.copy()
    scores[seen] = np.clip(penalized, -LARGEST_SCORE, LARGEST_SCORE)
    return Candidates(candidates.token_ids, scores)


def temperature(candidates: Candidates, params: SamplingParams, history: History) -> Candidates:
    """Divide the scores by the temperature (> 0), after moving the highest to 0, which no probability notices.

    Source: transformers' TemperatureLogitsWarper; without the move, a tiny temperature overflows.
    """
    with np.errstate(over="ignore"):  # far below the highest a score may become -inf: its probability is 0
        scores = (candidates.scores - candidates.scores.max()) / params.temperature
    return Candidates(candidates.token_ids, scores)


def top_k(candidates: Candidates, params: SamplingParams, history: History) -> Candidates:
    """Keep the k highest scores, and all that tie with the lowest of them.

    Source: arXiv 1805.04833 section 5.4; transformers' TopKLogitsWarper.
    """
    num_candidates = len(candidates.scores)
    if not 0 < params.top_k < num_candidates:
        return candidates
    # A partial sort: 0.2 ms against 3.2 ms for a sort of 128,256 scores.
    threshold = np.partition(candidates.scores, num_candidates - params.top_k)[num_candidates - params.top_k]
    return candidates.keep(candidates.scores >= threshold)


def top_p(candidates: Candidates, params: SamplingParams, history: History) -> Candidates:
    """Keep the fewest most probable tokens whose probabilities sum to at least p; of equals the lower ids first.

    Source: arXiv 1904.09751 section 3.1; transformers' TopPLogitsWarper, which leaves the order of equals open.
    """
    if params.top_p == 1:
        return candidates
    scores = candidates.scores
    weights = np.exp(scores - scores.max())
    total = weights.sum()
    # Tokens less probable than (1 - p) / n sum to less than 1 - p, so the others reach p without them: of 128,256
    # tokens with a natural distribution about 18,000 are left to sort.
    is_heavy = weights >= (1 - params.top_p) / len(weights) * total
    descending = np.sort(scores[is_heavy])[::-1]
    mass = np.cumsum(np.exp(descending - descending[0]))
    # The token that crosses p; for p just below 1, rounding may put the end of `mass` below p * total.
    last = min(int(np.searchsorted(mass, params.top_p * total)), len(mass) - 1)
    kept = scores > descending[last]
    ties = np.flatnonzero(scores == descending[last])
    ties = ties[np.argsort(candidates.token_ids[ties])]
    kept[ties[: last + 1 - np.count_nonzero(kept)]] = True
    return candidates.keep(kept)


def min_p(candidates: Candidates, params: SamplingParams, history: History) -> Candidates:
    """Keep the tokens at least `min_p` times as probable as the most probable one.

    Source: arXiv 2407.01082 section 3; transformers' MinPLogitsWarper.
    """
    if params.min_p == 0:
        return candidates
    return candidates.keep(candidates.scores >= candidates.scores.max() + np.log(params.min_p))


PENALTIES = (Step("repetition_penalty", repetition_penalty),)
FILTERS = (Step("temperature", temperature), Step("top_k", top_k), Step("top_p", top_p), Step("min_p", min_p))


def run_steps(
    logits: NDArray[np.float32], history: History, params: SamplingParams
) -> Iterator[tuple[str, Candidates]]:
    """Yield `logits` and then each step's name, with the candidates that are left after it.

    Greedy choice (temperature 0) takes no filters: they never remove the highest score.
    Shapes and errors as in `choose`.
    """
    candidates = gather_candidates(logits, len(history))
    yield "logits", candidates
    for step in PENALTIES if params.temperature == 0 else PENALTIES + FILTERS:
        candidates = step.apply(candidates, params, history)
        yield step.name, candidates


def draw(candidates: Candidates, sampler: Sampler, position: int) -> int:
    """Draw a token with the probabilities that the scores stand for; at temperature 0 take the highest score.

    Score plus Gumbel noise is highest for token i with probability exp(score_i) / sum_j exp(score_j). The noise
    belongs to (seed, sample_index, position, token_id), so nothing else in the batch can change the draw.
    Source: Gumbel 1954; Maddison, Tarlow, Minka, "A* sampling", NIPS 2014, section 2.
    """
    race = candidates.scores
    if sampler.params.temperature > 0:
        race = race + gumbel(sampler.seed, sampler.sample_index, position, candidates.token_ids)
    return int(candidates.token_ids[race == race.max()].min())


def log_probability(logits: NDArray[np.float32], token_id: int) -> float:
    """Return the natural logarithm of the probability that the model itself gives a token (log-softmax of logits).

    That is before penalties, temperature and filters, so it measures the model, and compares between settings.
    Shapes: logits [vocab_size] float32.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def choose(logits: NDArray[np.float32], history: History, sampler: Sampler, with_logprob: bool = False) -> Choice:
    """Choose the token that follows `history`, the ids of the prompt and of all tokens generated so far.

    Its length is the position of the chosen token and part of the key of the noise. The log-probability costs a pass
    of exponentials over the vocabulary, so it is computed only on request.

    Shapes: logits [vocab_size] float32; history [position] integers.
    Raises: CheckpointError for logits with NaN or +inf, or all -inf.
    """
    *_, (_, candidates) = run_steps(logits, history, sampler.params)
    token_id = draw(candidates, sampler, len(history))
    return Choice(token_id, log_probability(logits, token_id) if with_logprob else None)
