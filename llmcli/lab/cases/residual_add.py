"""Adds a product to the residual stream, times a row's scale, plus a bias."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.norms import residual_add, residual_add_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import COLUMNS, make_rows, powers_of_two


def case(num_rows: int, num_columns: int, extra: int, has_scale: bool, has_bias: bool) -> Problem:
    """A product with `extra` columns more than the residual stream."""
    inputs = {
        "x": make_rows(num_rows, num_columns + extra),
        "before": make_rows(num_rows, num_columns, seed=1)[::-1].copy(),
    }
    if has_scale:
        inputs["row_scale"] = powers_of_two(num_rows)
    if has_bias:
        inputs["bias"] = np.random.default_rng(3).normal(size=num_columns).astype(np.float32)

    def reference() -> dict[str, Expected]:
        added = inputs["x"][:, :num_columns].astype(np.float64)
        if has_scale:
            added = added * inputs["row_scale"][:, None]
        if has_bias:
            added = added + inputs["bias"]
        values = inputs["before"] + added
        return {"hidden": Expected(values, EPSILON * (np.abs(values) * (1 + EPSILON) + np.abs(added)))}

    return Problem(
        "residual_add",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs=inputs,
        outputs={"hidden": Output((num_rows, num_columns), initial="before")},
        reference=reference,
        cost=residual_add_cost(num_rows=num_rows, num_columns=num_columns, has_bias=has_bias),
        solvers={ENGINE: _solve},
        label=" ".join(name for name, given in (("scale", has_scale), ("bias", has_bias)) if given),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        yield case(6, num_columns, 16, True, True)
        yield case(5, num_columns, 5, True, False)
        yield case(1, num_columns, 0, False, False)


def _solve(device: Device, arrays: Arrays) -> None:
    residual_add(
        device,
        x=arrays["x"],
        row_scale=arrays.get("row_scale"),
        bias=arrays.get("bias"),
        hidden=arrays["hidden"],
    )


CASES = KernelCases("residual_add", _checks, partial(case, 16, 4096, 0, True, False))
