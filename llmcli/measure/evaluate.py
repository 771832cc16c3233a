"""Quality on a text: perplexity of one model, and how far a second one is from it.

Source: the strided window of Hugging Face's perplexity guide; Kullback-Leibler divergence and top-1 agreement as
llama.cpp's perplexity program reports them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmcli.engine.generation import scores_side_by_side
from llmcli.errors import UsageError
from llmcli.runners.base import AllLogits, Runner

Probabilities = npt.NDArray[np.float64]  # [num_tokens, vocab_size] natural logarithms

OnProgress = Callable[[int, int], None]  # tokens scored so far, tokens in all


@dataclass(frozen=True)
class Window:
    """Tokens run together: `token_ids`, of which those from `first` on are scored, the others are their context."""

    token_ids: Sequence[int]
    first: int


@dataclass(frozen=True)
class Evaluation:
    """Perplexity over `num_tokens` scored tokens, each with at least `window - stride` tokens of context.

    Units: `nll` is the mean negative logarithm of the probability, in nats a token
    """

    num_tokens: int
    window: int
    stride: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll)


@dataclass(frozen=True)
class Comparison:
    """A model (`first`) and a second one on the same tokens.

    Units: `mean_kl` in nats a token, of the first model's distribution from the second's; `top1_agreement` a share
    """

    first: Evaluation
    second: Evaluation
    mean_kl: float
    top1_agreement: float


def windows(token_ids: Sequence[int], window: int, stride: int, bos_token_ids: Sequence[int]) -> Iterator[Window]:
    """Cut a text into overlapping windows so that every token but the first is scored once.

    Each window begins with the BOS token if the text does, since models are trained that way; it shifts nothing out.
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
    total, done = 0.0, 0
    for targets, (logprobs,) in _scored([runner], token_ids, stride, bos_token_ids):
        total -= float(logprobs[np.arange(len(targets)), targets].sum())
        done += len(targets)
        on_progress(done, len(token_ids))
    return Evaluation(done, runner.limits.max_seq_len, stride, total / done)


def compare(
    first: Runner,
    second: Runner,
    token_ids: Sequence[int],
    stride: int,
    bos_token_ids: Sequence[int] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> Comparison:
    """Both models over the same windows, position by position.

    Raises: UsageError if the text is too short to predict anything.
    """
    totals = np.zeros(4)  # negative log-likelihoods of both, divergence, agreements
    done = 0
    for targets, (p, q) in _scored([first, second], token_ids, stride, bos_token_ids):
        rows = np.arange(len(targets))
        with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf) where both models exclude a token
            divergence = np.nansum(np.exp(p) * (p - q))
        agreements = np.count_nonzero(p.argmax(axis=1) == q.argmax(axis=1))
        totals += (-p[rows, targets].sum(), -q[rows, targets].sum(), divergence, agreements)
        done += len(targets)
        on_progress(done, len(token_ids))
    first_nll, second_nll, mean_kl, agreement = totals / done
    window_size = first.limits.max_seq_len
    return Comparison(
        Evaluation(done, window_size, stride, float(first_nll)),
        Evaluation(done, window_size, stride, float(second_nll)),
        float(mean_kl),
        float(agreement),
    )


def log_softmax(logits: AllLogits) -> Probabilities:
    """Natural logarithms of the probabilities. Shapes: logits and result [num_tokens, vocab_size]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _scored(
    runners: Sequence[Runner], token_ids: Sequence[int], stride: int, bos_token_ids: Sequence[int]
) -> Iterator[tuple[npt.NDArray[np.int64], list[Probabilities]]]:
    """Tokens to predict, a chunk at a time, and each runner's log-probabilities at their places."""
    if len(token_ids) < 2:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to predict; give a longer one")
    for window in windows(token_ids, runners[0].limits.max_seq_len, stride, bos_token_ids):
        targets = np.asarray(window.token_ids[window.first :], dtype=np.int64)
        for logits in scores_side_by_side(runners, window.token_ids, window.first):
            logprobs = [log_softmax(chunk) for chunk in logits]
            yield targets[: len(logprobs[0])], logprobs
            targets = targets[len(logprobs[0]) :]
