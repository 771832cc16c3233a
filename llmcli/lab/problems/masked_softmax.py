"""Attention's scores to weights: ALiBi's bias, the causal mask, softmax. Source: arXiv 2108.12409."""

import numpy as np

from llmcli.errors import UsageError
from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24
_SMALLEST = 2.0**-126  # smaller numbers may be 0
_MASK_VALUE = np.float32(-10000)  # of fastllm; its exponential is 0 next to any visible score


def make(num_heads: int, num_queries: int, num_keys: int) -> Problem:
    """out = softmax(scores + slopes * key) over the keys that a query sees; the others get 0.

    The queries are the last tokens: query q sees the keys up to num_keys - num_queries + q.
    Shapes: scores, out, biased (scratch) [num_heads, num_queries, num_keys]; mask [num_queries, num_keys], 1 where a
            key is hidden; slopes [num_heads]; all float32
    Raises: UsageError for more queries than keys
    """
    if num_queries > num_keys:
        raise UsageError(f"masked_softmax: {num_queries} queries are more than {num_keys} keys")
    generator = np.random.default_rng([num_heads, num_queries, num_keys])
    scores = 3 * generator.standard_normal((num_heads, num_queries, num_keys), dtype=np.float32)
    slopes = (2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)).astype(np.float32)
    keys = np.arange(num_keys)
    hidden = keys > num_keys - num_queries + np.arange(num_queries)[:, None]
    num_seen = num_heads * int((~hidden).sum())

    return Problem(
        "masked_softmax",
        {"num_heads": num_heads, "num_queries": num_queries, "num_keys": num_keys},
        inputs={"scores": scores, "mask": hidden.astype(np.float32), "slopes": slopes},
        outputs={"out": Output(scores.shape)},
        reference=lambda: {"out": _expected(scores, slopes[:, None, None] * keys.astype(np.float64), hidden)},
        cost=KernelCost(read_bytes=4 * (num_seen + num_heads), written_bytes=4 * scores.size, flops=6 * num_seen),
        scalars={"mask_value": _MASK_VALUE},
        scratch={"biased": Output(scores.shape)},
    )


def _expected(scores: np.ndarray, bias: np.ndarray, hidden: np.ndarray) -> Expected:
    biased = np.where(hidden, -np.inf, scores + bias)
    distance = biased - biased.max(axis=-1, keepdims=True)
    weights = np.exp(distance)
    weights /= weights.sum(axis=-1, keepdims=True)
    # Roundings before an exponential move it by as much: bias, biased score, distance. Then the exponential itself,
    # within 2 ulp. The sum has the errors of its terms by their weight, and half its own; a division is last.
    with np.errstate(invalid="ignore"):
        errors = np.where(hidden, 0, np.abs(bias) + np.abs(biased) + np.abs(distance) + 4)
    of_sum = (weights * errors).sum(axis=-1, keepdims=True) + np.sqrt(scores.shape[-1]) / 2 + 3
    return Expected(weights, _ROUNDING * (errors + of_sum) * weights + _SMALLEST)


MASKED_SOFTMAX = ProblemKind("masked_softmax", "softmax of scores with ALiBi and the causal mask", make)
