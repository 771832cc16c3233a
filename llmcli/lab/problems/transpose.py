"""The transpose of a matrix: every byte moves, and nothing is computed."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind


def make(num_rows: int, num_columns: int) -> Problem:
    """out[j, i] = x[i, j].

    Shapes: x [num_rows, num_columns]; out [num_columns, num_rows]; both float32
    """
    x = np.random.default_rng([num_rows, num_columns]).random((num_rows, num_columns), np.float32)
    return Problem(
        "transpose",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x},
        outputs={"out": Output((num_columns, num_rows))},
        reference=lambda: {"out": Expected(np.ascontiguousarray(x.T, np.float64), 0.0)},
        cost=KernelCost(read_bytes=x.nbytes, written_bytes=x.nbytes, flops=0),
    )


TRANSPOSE = ProblemKind("transpose", "the transpose of a matrix", make)
