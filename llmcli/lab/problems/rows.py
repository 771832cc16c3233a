"""Sums, maxima, softmax and norms of the rows of a matrix. Those of llmcli have its kernel as a solver."""

import numpy as np

from llmcli.errors import UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, Output, Problem, ProblemKind, by_engine
from llmcli.lab.row_kernels import (
    MAX_SPLITS,
    rms_norm,
    rms_norm_cost,
    row_reduce,
    row_reduce_cost,
    softmax,
    softmax_cost,
)

EPS = np.float32(1e-5)  # of the norms
_NUM_PARTS = 32  # of a row that several blocks share
_NUM_TIES = 3
_SMALLEST_NORMAL = 2.0**-126  # below it an exponential may be 0
_MASK_VALUE = np.float32(-10000)  # of fastllm; its exponential is 0 next to any visible score


def make_row_sum(num_rows: int, num_columns: int) -> Problem:
    """out[t] = sum_i x[t, i]. Shapes: x [num_rows, num_columns]; out [num_rows]; both float32"""
    x = np.random.default_rng([num_rows, num_columns]).standard_normal((num_rows, num_columns), np.float32)

    def reference() -> dict[str, Expected]:
        wide = x.astype(np.float64)
        values = wide.sum(axis=1)
        # The numbers have either sign, so a sum of k of them is near sqrt(k). Added one after another, n of them have
        # a deviation of 0.4 n roundings; this is eight of those, and more than the worst case up to five columns.
        return {"out": Expected(values, 4 * ROUNDING * np.abs(wide).sum(axis=1))}

    return Problem(
        inputs={"x": x},
        outputs={"out": Output((num_rows,))},
        reference=reference,
        cost=row_reduce_cost(num_rows=num_rows, num_columns=num_columns),
        scratch=_workspace(num_rows),
        solvers=by_engine(row_reduce, "x", "out", "partials", "counters", op="sum"),
    )


def make_top1(num_rows: int, num_columns: int) -> Problem:
    """value[t] = max_i x[t, i], index[t] the lowest i that has it: the choice of greedy decoding.

    Most rows have their largest value several times.
    Shapes: x [num_rows, num_columns] float32; value [num_rows] float32; index [num_rows] int32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns), np.float32)
    places = generator.integers(num_columns, size=(num_rows, _NUM_TIES))
    np.put_along_axis(x, places, x.max(axis=1, keepdims=True) + np.float32(0.5), axis=1)

    def reference() -> dict[str, Expected]:
        return {
            "value": Expected(x.max(axis=1).astype(np.float64), 0.0),
            "index": Expected(x.argmax(axis=1).astype(np.float64), 0.0),
        }

    def solve(device: Device, arrays: Arrays) -> None:
        shared = {name: arrays[name] for name in ("x", "partials", "counters")}
        row_reduce(device, op="argmax", out=arrays["index"], **shared)
        row_reduce(device, op="max", out=arrays["value"], **shared)

    return Problem(
        inputs={"x": x},
        outputs={"value": Output((num_rows,)), "index": Output((num_rows,), np.int32)},
        reference=reference,
        cost=KernelCost(4 * x.size, 8 * num_rows, x.size),
        scratch={
            "part_values": Output((num_rows, _NUM_PARTS)),
            "part_indices": Output((num_rows, _NUM_PARTS), np.int32),
            **_workspace(num_rows),
        },
        solvers={ENGINE: solve},
    )


def _workspace(num_rows: int) -> dict[str, Output]:
    """What row_reduce needs where several blocks share a row."""
    return {
        "partials": Output((num_rows, 2 * MAX_SPLITS)),
        "counters": Output((num_rows,), np.int32, holds_zeros=True),
    }


def make_softmax(num_rows: int, num_columns: int) -> Problem:
    """out = exp(x - max(x)) / sum(exp(x - max(x))) of every row. Source: arXiv 1805.02867, algorithm 2.

    Shapes: x, out [num_rows, num_columns] float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = 3 * generator.standard_normal((num_rows, num_columns), np.float32)

    def reference() -> dict[str, Expected]:
        wide = x.astype(np.float64)
        distance = wide.max(axis=1, keepdims=True) - wide
        powers = np.exp(-distance)
        total = powers.sum(axis=1, keepdims=True)
        values = powers / total
        # A difference is rounded before it is raised: once in an element, and twice on average in the sum, where a
        # maximum was raised. Then the sum's own roundings, those of a dozen new maxima, of the quotient and of expf.
        roundings = distance + 2 * (values * distance).sum(axis=1, keepdims=True) + np.sqrt(num_columns) + 72
        return {"out": Expected(values, ROUNDING * roundings * values + _SMALLEST_NORMAL)}

    return Problem(
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=softmax_cost(num_rows=num_rows, num_columns=num_columns),
        solvers=by_engine(softmax, "x", "out"),
    )


def make_masked_softmax(num_heads: int, num_queries: int, num_keys: int) -> Problem:
    """out = softmax(scores + slopes * key) over the keys that a query sees; the others get 0.

    Attention's scores with ALiBi's bias. Source: arXiv 2108.12409.
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

    def reference() -> dict[str, Expected]:
        bias = slopes[:, None, None] * keys.astype(np.float64)
        biased = np.where(hidden, -np.inf, scores + bias)
        distance = biased - biased.max(axis=-1, keepdims=True)
        weights = np.exp(distance)
        weights /= weights.sum(axis=-1, keepdims=True)
        # Roundings before an exponential move it by as much: bias, biased score, distance. Then the exponential itself,
        # within 2 ulp. The sum has the errors of its terms by their weight, and half its own; a division is last.
        with np.errstate(invalid="ignore"):
            errors = np.where(hidden, 0, np.abs(bias) + np.abs(biased) + np.abs(distance) + 4)
        of_sum = (weights * errors).sum(axis=-1, keepdims=True) + np.sqrt(num_keys) / 2 + 3
        return {"out": Expected(weights, ROUNDING * (errors + of_sum) * weights + _SMALLEST_NORMAL)}

    return Problem(
        inputs={"scores": scores, "mask": hidden.astype(np.float32), "slopes": slopes},
        outputs={"out": Output(scores.shape)},
        reference=reference,
        cost=KernelCost(read_bytes=4 * (num_seen + num_heads), written_bytes=4 * scores.size, flops=6 * num_seen),
        scalars={"mask_value": _MASK_VALUE},
        scratch={"biased": Output(scores.shape)},
    )


def make_rms_norm(num_rows: int, num_columns: int) -> Problem:
    """out = weight * x / sqrt(mean(x^2) + eps). Source: arXiv 1910.07467, equation 4.

    Shapes: x, out [num_rows, num_columns]; weight [num_columns]; all float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns)).astype(np.float32)
    weight = generator.uniform(0.5, 2, num_columns).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values = rms_normed(x, weight)
        # Half of the sum's error, then a division, eps, a root (2 ulp) and two products.
        return {"out": Expected(values, (np.sqrt(num_columns) / 2 + 8) * ROUNDING * np.abs(values))}

    return Problem(
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=4),
        scalars={"eps": EPS},
        scratch={"row_scale": Output((num_rows,))},
        solvers=by_engine(rms_norm, "x", "weight", "out", "row_scale", eps=float(EPS)),
    )


def rms_normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The norm of every row in float64."""
    wide = x.astype(np.float64)
    return np.asarray(weight * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float64(EPS)))


def make_layer_norm(num_rows: int, num_columns: int) -> Problem:
    """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. Source: arXiv 1607.06450, equation 4.

    The mean is not 0, so that a variance from squares loses some bits, as it does in a model.
    Shapes: x, out [num_rows, num_columns]; weight, bias [num_columns]; all float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns), np.float32) + np.float32(0.75)
    weight = generator.uniform(0.5, 2, num_columns).astype(np.float32)
    bias = generator.standard_normal(num_columns, np.float32)

    def reference() -> dict[str, Expected]:
        return {"out": _layer_normed(x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64))}

    return Problem(
        inputs={"x": x, "weight": weight, "bias": bias},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(4 * x.size + 8 * num_columns, 4 * x.size, 7 * x.size, 8 * num_columns),
        scalars={"eps": EPS},
    )


def _layer_normed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Expected:
    mean = x.mean(axis=1, keepdims=True)
    distance = x - mean
    variance = (distance**2).mean(axis=1, keepdims=True) + np.float64(EPS)
    deviation = np.sqrt(variance)
    normed = distance / deviation
    values = normed * weight + bias
    # The sums' roundings of either sign in any order, and four of the results made from them.
    of_sum = np.sqrt(x.shape[1]) + 4
    of_mean = of_sum * np.abs(x).mean(axis=1, keepdims=True)
    # As mean(x^2) - mean(x)^2, the form that loses most.
    of_variance = of_sum * (x**2).mean(axis=1, keepdims=True) + 2 * np.abs(mean) * of_mean + 8 * mean**2
    # A difference; half of the variance's relative error; root, quotient and two products.
    of_normed = (np.abs(distance) + of_mean) / deviation + np.abs(normed) * (of_variance / variance / 2 + 8)
    return Expected(values, ROUNDING * (of_normed * np.abs(weight) + 2 * (np.abs(normed * weight) + np.abs(bias))))


KINDS = (
    ProblemKind("row_sum", "sums of rows", make_row_sum),
    ProblemKind("top1", "the largest of each row, and its column", make_top1),
    ProblemKind("softmax", "softmax of rows", make_softmax),
    ProblemKind("masked_softmax", "softmax of scores with ALiBi and the causal mask", make_masked_softmax),
    ProblemKind("rms_norm", "RMSNorm of rows", make_rms_norm),
    ProblemKind("layer_norm", "LayerNorm of rows", make_layer_norm),
)
