"""Two models on one prompt: where they part, and how sure each is of every token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmcli.engine.events import Token
from llmcli.engine.generation import Generation
from llmcli.engine.request import Request
from llmcli.engine.scores import scores
from llmcli.measure.evaluate import log_softmax
from llmcli.runners.base import Runner
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class DiffToken:
    """One token of the first model's greedy text. The second model reads the first one's text, not its own.

    `first_probability` and `second_probability` are what each gives this token; `second_choice` is the token the
    second would have taken; `kl` is the divergence of the second's distribution from the first's.
    Units: `kl` in nats
    """

    token_id: int
    first_probability: float
    second_probability: float
    second_choice: int
    kl: float

    @property
    def agrees(self) -> bool:
        """Whether both models take this token."""
        return self.token_id == self.second_choice


def diff(
    first: Runner,
    second: Runner,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
) -> Iterator[DiffToken]:
    """Generate greedily with the first model, then ask both about every token of that text."""
    prompt = tuple(prompt_token_ids)
    sampler = Sampler(SamplingParams(temperature=0.0), 0, num_prompt_tokens=len(prompt), eos_token_ids=eos_token_ids)
    request = Request(prompt, sampler, samples=(0,), max_new_tokens=max_new_tokens)
    events = Generation(first, tokenizer, request).events()
    said = [event.token_id for event in events if isinstance(event, Token)]
    chunks = [scores(runner, (*prompt, *said), len(prompt)) for runner in (first, second)]
    place = 0
    for logits in zip(*chunks, strict=True):
        for p, q in zip(*(log_softmax(chunk) for chunk in logits), strict=True):
            token_id = said[place]
            with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf) where both exclude a token
                kl = float(np.nansum(np.exp(p) * (p - q)))
            probabilities = float(np.exp(p[token_id])), float(np.exp(q[token_id]))
            yield DiffToken(token_id, *probabilities, int(q.argmax()), kl)
            place += 1


@dataclass(frozen=True)
class Verdict:
    """A diff in a few numbers; `num_agreeing` tokens stand before the first divergence, all of them if there is none.

    Units: `mean_kl` in nats a token; `mean_change` the mean absolute change of the chosen token's probability
    """

    num_tokens: int
    num_agreeing: int
    num_divergences: int
    mean_kl: float
    mean_change: float


def verdict(tokens: Sequence[DiffToken]) -> Verdict:
    """The numbers of a finished diff of at least one token."""
    agrees = [token.agrees for token in tokens]
    return Verdict(
        num_tokens=len(tokens),
        num_agreeing=agrees.index(False) if False in agrees else len(tokens),
        num_divergences=agrees.count(False),
        mean_kl=sum(token.kl for token in tokens) / len(tokens),
        mean_change=sum(abs(token.first_probability - token.second_probability) for token in tokens) / len(tokens),
    )
