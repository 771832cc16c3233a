"""RMSNorm of rows, rounded to the type of the matrix product."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.norms import rms_norm_cost
from llmcli.lab.matrices import EPSILON, STORAGE, storage_name
from llmcli.lab.problem import ENGINE, Expected, KernelCases, Output, Problem
from llmcli.lab.problems.rms_norm import normed, solve
from llmcli.lab.rows import COLUMNS, make_rows, rounded_rows


def case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """RMSNorm of rows of every kind, stored in any type with a power of two a row."""
    x = make_rows(num_rows, num_columns)
    generator = np.random.default_rng(num_columns)
    # Weights of 1e4 put rows above 2^15.
    weight = (generator.uniform(0.5, 2.0, num_columns) * generator.choice([-1, 1, 1e4], num_columns)).astype(np.float32)

    def reference() -> dict[str, Expected]:
        # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products.
        out, scale = rounded_rows(normed(x, weight), dtype, (np.sqrt(num_columns) / 2 + 7) * EPSILON)
        return {"out": out, "row_scale": scale}

    return Problem(
        "rms_norm",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape, dtype), "row_scale": Output((num_rows,))},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers={ENGINE: solve},
        label=storage_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        for dtype in STORAGE:
            yield case(6, num_columns, dtype)


CASES = KernelCases("rms_norm", _checks, partial(case, 1, 4096, np.float16))
