"""Puts the columns of rows into another order."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import gather_columns, gather_columns_cost
from llmcli.lab.matrices import storage_name
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values
from llmcli.lab.rows import COLUMNS, make_rows, widened


def case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """Rows with gaps between them, whose columns come in a random order: bits do not change."""
    x = np.clip(make_rows(num_rows, num_columns), -6e4, 6e4).astype(dtype)
    order = np.random.default_rng(num_columns).permutation(num_columns).astype(np.int32)

    def reference() -> dict[str, Expected]:
        return {"out": Expected(np.take(stored_values(x), order, axis=1), 0.0)}

    return Problem(
        "gather_columns",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": widened(x, 8), "order": order},
        outputs={"out": Output(x.shape, dtype)},
        reference=reference,
        cost=gather_columns_cost(num_rows=num_rows, num_columns=num_columns, itemsize=x.dtype.itemsize),
        solvers={ENGINE: partial(_solve, num_columns)},
        label=storage_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        for dtype in (np.float32, np.float16):
            yield case(6, num_columns, dtype)


def _solve(num_columns: int, device: Device, arrays: Arrays) -> None:
    gather_columns(device, x=arrays["x"][:, :num_columns], order=arrays["order"], out=arrays["out"])


CASES = KernelCases("gather_columns", _checks, partial(case, 8, 4096, np.float32))
