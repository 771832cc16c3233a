"""Quality on a text: one model's perplexity, a second model's distance from it, and where two differ on one prompt."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.engine.request import Request, Token
from llmcli.engine.scheduler import Generation, scores_side_by_side
from llmcli.errors import UsageError
from llmcli.measure.intervals import Interval, mean_interval, share_interval
from llmcli.runners.base import Runner
from llmcli.sampling.candidates import gather_candidates
from llmcli.sampling.chain import log_probabilities
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer

# Quality on a text: one model's perplexity, and a second model's distance from it.
#
# Source: the strided window of Hugging Face's perplexity guide; Kullback-Leibler divergence and top-1 agreement as in
# llama.cpp's perplexity program.

Values = npt.NDArray[Any]  # [num_tokens]
Probabilities = npt.NDArray[np.float64]  # [num_tokens, vocab_size] natural logarithms

OnProgress = Callable[[int, int], None]  # tokens scored so far, tokens in all


@dataclass(frozen=True)
class Window:
    """Tokens run together: those of `token_ids` from `first` on are scored, the others are their context."""

    token_ids: Sequence[int]
    first: int


@dataclass(frozen=True)
class Evaluation:
    """Perplexity over `num_tokens` scored tokens, each with at least `window - stride` tokens of context.

    Units: `nll` is the mean negative logarithm of the probability, in nats a token; intervals hold 95 % and are None
    for fewer than 20 tokens
    """

    num_tokens: int
    window: int
    stride: int
    nll: float
    nll_interval: Interval | None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll)

    @property
    def perplexity_interval(self) -> Interval | None:
        """exp of both ends."""
        return None if self.nll_interval is None else (math.exp(self.nll_interval[0]), math.exp(self.nll_interval[1]))


@dataclass(frozen=True)
class Comparison:
    """A model (`first`) and a second one on the same tokens.

    `nll_change_interval` is of the second's nll minus the first's, token by token: what makes a text hard for both
    cancels out, so it is much narrower than those of the two.
    Units: `mean_kl` in nats a token, of the first model's distribution from the second's; `top1_agreement` a share;
    intervals as of `Evaluation`
    """

    first: Evaluation
    second: Evaluation
    nll_change_interval: Interval | None
    mean_kl: float
    mean_kl_interval: Interval | None
    top1_agreement: float
    top1_agreement_interval: Interval | None

    @property
    def perplexity_change(self) -> float:
        """The second's perplexity relative to the first's, minus 1."""
        return math.expm1(self.second.nll - self.first.nll)

    @property
    def perplexity_change_interval(self) -> Interval | None:
        """The same of both ends."""
        ends = self.nll_change_interval
        return None if ends is None else (math.expm1(ends[0]), math.expm1(ends[1]))

    @property
    def perplexity_differs(self) -> bool | None:
        """Whether the text shows a difference: its interval leaves 0 out. None without an interval."""
        ends = self.nll_change_interval
        return None if ends is None else not ends[0] <= 0 <= ends[1]


def windows(token_ids: Sequence[int], window: int, stride: int, bos_token_ids: Sequence[int]) -> Iterator[Window]:
    """Cut a text into overlapping windows so that every token except the first is scored once.

    Each window begins with the BOS token if the text does, as in training; it replaces no other token.
    """
    prefix = list(bos_token_ids)
    body = token_ids[len(prefix) :]
    room = window - len(prefix)
    scored = 0 if prefix else 1  # nothing predicts a text's very first token
    end = 0
    while end < len(body):
        end = min(len(body), end + stride if end else room)
        begin = max(0, end - room)
        yield Window([*prefix, *body[begin:end]], first=len(prefix) + scored - begin)
        scored = end


def evaluate(
    runner: Runner,
    token_ids: Sequence[int],
    stride: int,
    bos_token_ids: Sequence[int] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Perplexity of a text, in windows of the runner's whole context.

    Raises: UsageError if the text is too short to predict anything.
    """
    losses: list[Values] = []
    done = 0
    for targets, (logprobs,) in _scored([runner], token_ids, stride, bos_token_ids):
        losses.append(-logprobs[np.arange(len(targets)), targets])
        done += len(targets)
        on_progress(done, len(token_ids))
    return _evaluation(np.concatenate(losses), runner, stride)


def _evaluation(losses: Values, runner: Runner, stride: int) -> Evaluation:
    """Shapes: losses [num_tokens] negative logarithms of the probabilities, in the order of the text."""
    nll = float(losses.mean())
    return Evaluation(len(losses), runner.limits.max_seq_len, stride, nll, mean_interval(losses))


def compare(
    first: Runner,
    second: Runner,
    token_ids: Sequence[int],
    stride: int,
    bos_token_ids: Sequence[int] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> Comparison:
    """Score both models over the same windows, position by position.

    Raises: UsageError if the text is too short to predict anything.
    """
    chunks: list[tuple[Values, ...]] = []  # of losses of both, divergences, agreements
    done = 0
    for targets, (p, q) in _scored([first, second], token_ids, stride, bos_token_ids):
        rows = np.arange(len(targets))
        with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf) if both models exclude a token
            divergences = np.nansum(np.exp(p) * (p - q), axis=1)
        chunks.append((-p[rows, targets], -q[rows, targets], divergences, p.argmax(axis=1) == q.argmax(axis=1)))
        done += len(targets)
        on_progress(done, len(token_ids))
    first_losses, second_losses, divergences, agreements = map(np.concatenate, zip(*chunks, strict=True))
    return Comparison(
        _evaluation(first_losses, first, stride),
        _evaluation(second_losses, first, stride),
        nll_change_interval=mean_interval(second_losses - first_losses),
        mean_kl=float(divergences.mean()),
        mean_kl_interval=_not_negative(mean_interval(divergences)),
        top1_agreement=float(agreements.mean()),
        top1_agreement_interval=share_interval(agreements),
    )


def _not_negative(interval: Interval | None) -> Interval | None:
    return interval and (max(0.0, interval[0]), interval[1])


def _scored(
    runners: Sequence[Runner], token_ids: Sequence[int], stride: int, bos_token_ids: Sequence[int]
) -> Iterator[tuple[npt.NDArray[np.int64], list[Probabilities]]]:
    """Tokens to predict, a chunk at a time, and each runner's log-probabilities at their positions."""
    if len(token_ids) < 2:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to predict; give a longer one")
    for window in windows(token_ids, runners[0].limits.max_seq_len, stride, bos_token_ids):
        targets = np.asarray(window.token_ids[window.first :], dtype=np.int64)
        for logits in scores_side_by_side(runners, window.token_ids, window.first):
            logprobs = [log_probabilities(chunk) for chunk in logits]
            yield targets[: len(logprobs[0])], logprobs
            targets = targets[len(logprobs[0]) :]


# Two models on one prompt: where they differ, and how sure each is of every token.

Logprobs = npt.NDArray[np.float64]  # [vocab_size]

NUM_ALTERNATIVES = 5  # of each model

# The meaning of a mean KL divergence below each number. docs/guide/quantization.md has the table.
VERDICTS = (
    (0.002, "practically the same model"),
    (0.02, "nearly the same model"),
    (0.1, "a close relative"),
    (0.5, "a clearly different model"),
)
LAST_VERDICT = "another model"


@dataclass(frozen=True)
class Alternative:
    """A possible token at a position, and its probability in each model."""

    token_id: int
    first_probability: float
    second_probability: float


@dataclass(frozen=True)
class DiffToken:
    """One token of the first model's greedy text. The second model reads the first one's text, not its own.

    `first_probability` and `second_probability` are this token's in each model; `second_choice` is the token that the
    second would have chosen; `kl` is the divergence of the second's distribution from the first's; `alternatives` are
    the likeliest tokens of both, the likeliest of either first.
    Units: `kl` in nats
    """

    token_id: int
    first_probability: float
    second_probability: float
    second_choice: int
    kl: float
    alternatives: tuple[Alternative, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether both models choose this token."""
        return self.token_id == self.second_choice


def diff(
    first: Runner,
    second: Runner,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
) -> Iterator[DiffToken]:
    """Generate greedily with the first model, then ask both about every token of that text.

    Raises: CheckpointError for logits that are not numbers
    """
    prompt = tuple(prompt_token_ids)
    sampler = Sampler(SamplingParams(temperature=0.0), 0, num_prompt_tokens=len(prompt), eos_token_ids=eos_token_ids)
    request = Request(prompt, sampler, samples=(0,), max_new_tokens=max_new_tokens)
    events = Generation(first, tokenizer, request).events()
    said = [event.token_id for event in events if isinstance(event, Token)]
    place = 0
    for logits in scores_side_by_side((first, second), (*prompt, *said), len(prompt)):
        for row, of_second in enumerate(logits[1], len(prompt) + place):
            gather_candidates(of_second, row)  # refuses what no sound model computes, as the first one's choices did
        for p, q in zip(*(log_probabilities(chunk) for chunk in logits), strict=True):
            token_id = said[place]
            with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf) if both exclude a token
                kl = float(np.nansum(np.exp(p) * (p - q)))
            probabilities = float(np.exp(p[token_id])), float(np.exp(q[token_id]))
            yield DiffToken(token_id, *probabilities, int(q.argmax()), kl, _alternatives(p, q))
            place += 1


def _alternatives(p: Logprobs, q: Logprobs) -> tuple[Alternative, ...]:
    count = min(NUM_ALTERNATIVES, len(p))
    likeliest = {int(index) for each in (p, q) for index in np.argpartition(-each, count - 1)[:count]}
    found = [Alternative(index, float(np.exp(p[index])), float(np.exp(q[index]))) for index in likeliest]
    return tuple(sorted(found, key=lambda one: (-max(one.first_probability, one.second_probability), one.token_id)))


@dataclass(frozen=True)
class Verdict:
    """A diff in a few numbers; `num_agreeing` tokens come before the first divergence, all of them if there is none.

    `divergent_probability` is the second model's mean probability of the first one's token where it would choose
    another; None if there is no such place. `kinship` says in words what the mean divergence means.
    Units: `mean_kl` in nats a token; `mean_change` the mean absolute change of the chosen token's probability
    """

    num_tokens: int
    num_agreeing: int
    num_divergences: int
    mean_kl: float
    mean_change: float
    divergent_probability: float | None
    kinship: str


def verdict(tokens: Sequence[DiffToken]) -> Verdict:
    """The numbers of a finished diff of at least one token."""
    agrees = [token.agrees for token in tokens]
    mean_kl = sum(token.kl for token in tokens) / len(tokens)
    elsewhere = [token.second_probability for token in tokens if not token.agrees]
    return Verdict(
        num_tokens=len(tokens),
        num_agreeing=agrees.index(False) if False in agrees else len(tokens),
        num_divergences=agrees.count(False),
        mean_kl=mean_kl,
        mean_change=sum(abs(token.first_probability - token.second_probability) for token in tokens) / len(tokens),
        divergent_probability=sum(elsewhere) / len(elsewhere) if elsewhere else None,
        kinship=next((words for limit, words in VERDICTS if mean_kl < limit), LAST_VERDICT),
    )
