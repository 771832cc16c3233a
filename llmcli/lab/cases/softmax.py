"""softmax of rows, and its logarithm."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.reductions import softmax, softmax_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import COLUMNS, make_rows, widened


def case(num_rows: int, num_columns: int, extra: int, log: bool) -> Problem:
    """Rows of every kind in wider ones."""
    return case_of(make_rows(num_rows, num_columns), extra, log)


def masked_case(num_columns: int, log: bool) -> Problem:
    """Rows with columns of -inf, a row of only these, and one with a NaN."""
    x = np.random.default_rng(7).normal(scale=3, size=(5, num_columns)).astype(np.float32)
    x[0, : num_columns - 1] = -np.inf
    x[1, 5:] = -np.inf
    x[2, ::2] = -np.inf
    x[3] = -np.inf
    x[4, num_columns // 2] = np.nan
    return case_of(x, 0, log)


def case_of(x: np.ndarray, extra: int, log: bool) -> Problem:
    """These rows in wider ones; the columns between them do not change."""
    num_rows, num_columns = x.shape

    def reference() -> dict[str, Expected]:
        values, bound = _log_softmax(x) if log else _softmax(x)
        beside = np.full((num_rows, extra), np.nan)
        wide_bound = np.concatenate([bound, np.zeros_like(beside)], axis=1)
        return {"out": Expected(np.concatenate([values, beside], axis=1), wide_bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        softmax(device, x=arrays["x"][:, :num_columns], out=arrays["out"][:, :num_columns], log=log)

    return Problem(
        "softmax",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"x": widened(x, extra)},
        outputs={"out": Output((num_rows, num_columns + extra))},
        reference=reference,
        cost=softmax_cost(num_rows=num_rows, num_columns=num_columns),
        solvers={ENGINE: solve},
        label="log" if log else "",
    )


def _softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance, powers, total, of_sum = _parts(x)
    values = powers / total
    # Below the smallest normal number expf may give 0.
    roundings = 8 + np.where(powers > 0, distance, 0.0) + of_sum
    return values, np.nan_to_num(EPSILON * roundings * values) + 2.0**-126


def _log_softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance, _, total, of_sum = _parts(x)
    values = -distance - np.log(total)
    with np.errstate(invalid="ignore"):
        bound = EPSILON * (2 * np.abs(values) + distance + 2 * np.log(total) + of_sum)
    return values, np.where(np.isfinite(values), bound, 0.0)


def _parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Distances from a row's maximum, their powers, the sum of these, and that sum's error in roundings."""
    wide = x.astype(np.float64)
    maximum = wide.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # rows without a finite maximum
        distance = maximum - wide
        powers = np.exp(-distance)
        total = powers.sum(axis=1, keepdims=True)
        # As in log_sum_exp's bound; x - max is rounded before it is raised.
        mean_distance = (powers * np.where(powers > 0, distance, 0.0)).sum(axis=1, keepdims=True) / total
    return distance, powers, total, 2 * mean_distance + np.sqrt(x.shape[1]) + 64


def _checks() -> Iterator[Problem]:
    for log in (False, True):
        for num_columns in (*COLUMNS, 32001):
            yield case(5, num_columns, 3, log)
            yield case(6, num_columns, 0, log)
        for num_columns in (40, 1003, 32001):
            yield masked_case(num_columns, log)


CASES = KernelCases("softmax", _checks, partial(case, 1, 128256, 0, False))
