"""The sampler chain: from one row of logits to one token id, a pure function without state.

Order:

    logit_bias -> eos_ban -> repetition_penalty -> presence_penalty -> frequency_penalty -> dry
    -> temperature -> top_k -> top_p -> min_p -> typical_p -> xtc -> draw

- What transformers has stands in transformers' order, so that a model's generation_config means what its author tuned.
  (llama.cpp has the temperature last, so that there it does not move what the filters cut off.)
- The bias comes first, as in llama.cpp too: the penalties weigh the biased score.
- Bans come before everything that counts candidates, so that top_k = 1 finds another token when the likeliest is
  banned. transformers bans the end after the repetition penalty, which comes to the same.
- Presence and frequency penalty follow the repetition penalty, whose factor depends on a score's sign, and DRY follows
  all three: vLLM's and llama.cpp's order.
- XTC comes last, as its author wants it: it keeps the least likely of the *viable* tokens, and what the other filters
  remove is not viable. Its threshold is one of probabilities after temperature and filters.

At temperature 0 it is the steps up to DRY -> the highest score; wherever scores tie, the lowest token id wins. The
filters are left out, XTC too: who asks for the likeliest token does not ask for its exclusion, and the random number
would make greedy text depend on the seed.

Each step sees the survivors of the one before. Scores are float64: steps and noise then agree between devices to
about 1e-14, so a CPU and a GPU draw the same token from the same logits but for a chance of that order. No
result depends on the order of the candidates, beyond the rounding of the sums in top_p, typical_p and xtc.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.sampling.candidates import Candidates, History, gather_candidates
from llmcli.sampling.filters import min_p, temperature, top_k, top_p, typical_p, xtc
from llmcli.sampling.penalties import (
    dry,
    eos_ban,
    frequency_penalty,
    logit_bias,
    presence_penalty,
    repetition_penalty,
)
from llmcli.sampling.philox import gumbel
from llmcli.sampling.sampler import Sampler


class Choice(NamedTuple):
    """A chosen token and, if it was asked for, its log-probability under the unmodified logits."""

    token_id: int
    logprob: float | None


class Step(NamedTuple):
    """One link of the chain; `apply` returns its candidates unchanged where its parameter is off."""

    name: str
    apply: Callable[[Candidates, Sampler, History], Candidates]


PENALTIES = (
    Step("logit_bias", logit_bias),
    Step("eos_ban", eos_ban),
    Step("repetition_penalty", repetition_penalty),
    Step("presence_penalty", presence_penalty),
    Step("frequency_penalty", frequency_penalty),
    Step("dry", dry),
)
FILTERS = (
    Step("temperature", temperature),
    Step("top_k", top_k),
    Step("top_p", top_p),
    Step("min_p", min_p),
    Step("typical_p", typical_p),
    Step("xtc", xtc),
)


def run_steps(logits: NDArray[np.float32], history: History, sampler: Sampler) -> Iterator[tuple[str, Candidates]]:
    """Yield `logits` and then each step's name, with the candidates that are left after it.

    Shapes and errors as in `choose`.
    """
    candidates = gather_candidates(logits, len(history))
    yield "logits", candidates
    for step in PENALTIES if sampler.params.temperature == 0 else PENALTIES + FILTERS:
        candidates = step.apply(candidates, sampler, history)
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


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the natural logarithm of the probability that the model itself gives each token (log-softmax of logits).

    That is before bias, penalties, temperature and filters, so it measures the model, and compares between settings.
    Shapes: logits [vocab_size] float32; result [vocab_size] float64.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def choose(logits: NDArray[np.float32], history: History, sampler: Sampler, with_logprob: bool = False) -> Choice:
    """Choose the token that follows `history`, the ids of the prompt and of all tokens generated so far.

    Its length is the position of the chosen token and part of the key of the noise. The log-probability costs a pass
    of exponentials over the vocabulary, so it is computed only on request.

    Shapes: logits [vocab_size] float32; history [position] integers.
    Raises: CheckpointError for logits with NaN or +inf, or all -inf; UsageError if bias and bans leave no token.
    """
    *_, (_, candidates) = run_steps(logits, history, sampler)
    token_id = draw(candidates, sampler, len(history))
    return Choice(token_id, float(log_probabilities(logits)[token_id]) if with_logprob else None)
