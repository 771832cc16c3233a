"""Softmax of rows. Source: arXiv 1805.02867, algorithm 2."""

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.reductions import softmax, softmax_cost
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24
_SMALLEST_NORMAL = 2.0**-126  # below it an exponential may be 0


def make(num_rows: int, num_columns: int) -> Problem:
    """out = exp(x - max(x)) / sum(exp(x - max(x))) of every row.

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
        return {"out": Expected(values, _ROUNDING * roundings * values + _SMALLEST_NORMAL)}

    return Problem(
        "softmax",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=softmax_cost(num_rows=num_rows, num_columns=num_columns),
        solvers={ENGINE: _solve},
    )


def _solve(device: Device, arrays: Arrays) -> None:
    softmax(device, x=arrays["x"], out=arrays["out"])


SOFTMAX = ProblemKind("softmax", "softmax of rows", make)
