"""Sums of the rows of a matrix, in float32."""

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.reductions import MAX_SPLITS, row_reduce, row_reduce_cost
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24


def make(num_rows: int, num_columns: int) -> Problem:
    """out[t] = sum_i x[t, i].

    Shapes: x [num_rows, num_columns]; out [num_rows]; both float32
    """
    x = np.random.default_rng([num_rows, num_columns]).standard_normal((num_rows, num_columns), np.float32)

    def reference() -> dict[str, Expected]:
        wide = x.astype(np.float64)
        values = wide.sum(axis=1)
        # The numbers have either sign, so a sum of k of them is near sqrt(k). Added one after another, n of them have
        # a deviation of 0.4 n roundings; this is eight of those, and more than the worst case up to five columns.
        return {"out": Expected(values, 4 * _ROUNDING * np.abs(wide).sum(axis=1))}

    return Problem(
        "row_sum",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x},
        outputs={"out": Output((num_rows,))},
        reference=reference,
        cost=row_reduce_cost(num_rows=num_rows, num_columns=num_columns),
        scratch={
            "partials": Output((num_rows, 2 * MAX_SPLITS)),
            "counters": Output((num_rows,), np.int32, holds_zeros=True),
        },
        solvers={ENGINE: _solve},
    )


def _solve(device: Device, arrays: Arrays) -> None:
    row_reduce(device, op="sum", **{name: arrays[name] for name in ("x", "out", "partials", "counters")})


ROW_SUM = ProblemKind("row_sum", "sums of rows", make)
