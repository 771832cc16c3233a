"""Rounds rows to a storage type, with a power of two a row."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.norms import round_rows, round_rows_cost
from llmcli.lab.matrices import STORAGE, storage_name, to_storage
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values
from llmcli.lab.rows import COLUMNS, make_rows, rounded_rows


def case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """Rows of every kind: they are only rounded once to the nearest, so every bit is known."""
    x = make_rows(num_rows, num_columns)

    def reference() -> dict[str, Expected]:
        _, scale = rounded_rows(x.astype(np.float64), dtype, 0.0)
        scaled = x / scale.values[:, None].astype(np.float32)  # by a power of two: exact
        return {"out": Expected(stored_values(to_storage(scaled, dtype)), 0.0), "row_scale": scale}

    return Problem(
        "round_rows",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x},
        outputs={"out": Output(x.shape, dtype), "row_scale": Output((num_rows,))},
        reference=reference,
        cost=round_rows_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers={ENGINE: _solve},
        label=storage_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        for dtype in STORAGE:
            yield case(6, num_columns, dtype)


def _solve(device: Device, arrays: Arrays) -> None:
    round_rows(device, x=arrays["x"], out=arrays["out"], row_scale=arrays["row_scale"])


CASES = KernelCases("round_rows", _checks, partial(case, 16, 4096, np.float16))
