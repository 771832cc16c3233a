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

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.sampling.candidates import Candidates, History, TokenMask, gather_candidates, schema
from llmcli.sampling.filters import min_p, mirostat, next_mu, temperature, top_k, top_n_sigma, top_p, typical_p, xtc
from llmcli.sampling.params import Sampler
from llmcli.sampling.penalties import (
    begin_suppress,
    dry,
    encoder_repetition_penalty,
    eos_ban,
    forced_eos,
    frequency_penalty,
    logit_bias,
    presence_penalty,
    repetition_penalty,
    sequence_bias,
)
from llmcli.sampling.philox import gumbel


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
    ChainStep("logit_bias", logit_bias),
    ChainStep("sequence_bias", sequence_bias),
    ChainStep("begin_suppress", begin_suppress),
    ChainStep("eos_ban", eos_ban),
    ChainStep("encoder_repetition_penalty", encoder_repetition_penalty),
    ChainStep("repetition_penalty", repetition_penalty),
    ChainStep("presence_penalty", presence_penalty),
    ChainStep("frequency_penalty", frequency_penalty),
    ChainStep("dry", dry),
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
FORCED_EOS = ChainStep("forced_eos", forced_eos)
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
    Shapes: logits [vocab_size] float32; result [vocab_size] float64.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
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
