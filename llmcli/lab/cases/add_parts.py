"""Adds the parts of a product, one after the other: every bit is known."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, add_parts_cost
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import make_rows


def case(num_parts: int, num_rows: int, num_columns: int) -> Problem:
    """Parts of every kind of rows, added to others."""
    parts = np.stack([make_rows(num_rows, num_columns, seed=seed) for seed in range(1, num_parts + 1)])
    before = make_rows(num_rows, num_columns)[::-1].copy()

    def reference() -> dict[str, Expected]:
        total = before.copy()
        for part in parts:
            total += part
        return {"out": Expected(total.astype(np.float64), 0.0)}

    return Problem(
        "add_parts",
        {"num_parts": num_parts, "num_rows": num_rows, "num_columns": num_columns},
        inputs={"parts": parts, "before": before},
        outputs={"out": Output((num_rows, num_columns), initial="before")},
        reference=reference,
        cost=add_parts_cost(num_parts=num_parts, size=num_rows * num_columns),
        solvers={ENGINE: _solve},
    )


def _checks() -> Iterator[Problem]:
    for num_parts in (1, 3, 4, 5, 7, 8):
        yield case(num_parts, 6, 1028)
        yield case(num_parts, 3, 21)


def _solve(device: Device, arrays: Arrays) -> None:
    add_parts(device, parts=arrays["parts"], out=arrays["out"])


CASES = KernelCases("add_parts", _checks, partial(case, 3, 256, 4096))
