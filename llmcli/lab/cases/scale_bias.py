"""Multiplies rows by their scales and adds a bias, in place."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.norms import scale_bias, scale_bias_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import COLUMNS, make_rows, powers_of_two


def case(num_rows: int, num_columns: int, extra: int, has_scale: bool, has_bias: bool) -> Problem:
    """Rows in a wider buffer, whose other columns do not change."""
    inputs = {"before": make_rows(num_rows, num_columns + extra)}
    if has_scale:
        inputs["row_scale"] = powers_of_two(num_rows)
    if has_bias:
        inputs["bias"] = np.random.default_rng(3).normal(size=num_columns).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values = inputs["before"].astype(np.float64)
        inside = values[:, :num_columns]
        if has_scale:
            inside *= inputs["row_scale"][:, None]
        if has_bias:
            inside += inputs["bias"]
        bound = np.zeros_like(values)
        bound[:, :num_columns] = EPSILON * np.abs(inside)
        return {"x": Expected(values, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        x = arrays["x"][:, :num_columns]
        scale_bias(device, x=x, row_scale=arrays.get("row_scale"), bias=arrays.get("bias"))

    return Problem(
        "scale_bias",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs=inputs,
        outputs={"x": Output(inputs["before"].shape, initial="before")},
        reference=reference,
        cost=scale_bias_cost(num_rows=num_rows, num_columns=num_columns, has_bias=has_bias),
        solvers={ENGINE: solve},
        label=" ".join(name for name, given in (("scale", has_scale), ("bias", has_bias)) if given),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        yield case(6, num_columns, 16, True, True)
        yield case(5, num_columns, 5, True, False)
        yield case(1, num_columns, 0, False, True)


CASES = KernelCases("scale_bias", _checks, partial(case, 16, 6144, 0, True, True))
