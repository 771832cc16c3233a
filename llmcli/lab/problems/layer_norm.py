"""LayerNorm of rows. Source: arXiv 1607.06450, equation 4."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind

_EPS = np.float32(1e-5)
_ROUNDING = 2.0**-24


def make(num_rows: int, num_columns: int) -> Problem:
    """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    The mean is not 0, so that a variance from squares loses some bits, as it does in a model.
    Shapes: x, out [num_rows, num_columns]; weight, bias [num_columns]; all float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns), np.float32) + np.float32(0.75)
    weight = generator.uniform(0.5, 2, num_columns).astype(np.float32)
    bias = generator.standard_normal(num_columns, np.float32)

    def reference() -> dict[str, Expected]:
        return {"out": _expected(x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64))}

    count = x.size
    return Problem(
        "layer_norm",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight, "bias": bias},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(4 * count + 8 * num_columns, 4 * count, 7 * count, 8 * num_columns),
        scalars={"eps": _EPS},
    )


def _expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Expected:
    mean = x.mean(axis=1, keepdims=True)
    distance = x - mean
    variance = (distance**2).mean(axis=1, keepdims=True) + np.float64(_EPS)
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
    return Expected(values, _ROUNDING * (of_normed * np.abs(weight) + 2 * (np.abs(normed * weight) + np.abs(bias))))


LAYER_NORM = ProblemKind("layer_norm", "LayerNorm of rows", make)
