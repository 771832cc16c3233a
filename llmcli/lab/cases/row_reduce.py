"""Sum, maximum, argmax and log-sum-exp of rows."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.reductions import MAX_SPLITS, RowOp, row_reduce, row_reduce_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import make_rows, sum_bound, widened

OPS: tuple[RowOp, ...] = ("sum", "max", "argmax", "log_sum_exp")


def case(op: RowOp, num_rows: int, num_columns: int, extra: int, split: bool) -> Problem:
    """Rows of every kind in wider ones; with `split` there is a workspace for the form of few long rows."""
    return case_of(op, make_rows(num_rows, num_columns), extra, split)


def special_case(op: RowOp, num_columns: int, split: bool) -> Problem:
    """Ties, rows of -inf, of NaN, of +inf and of zeros of both signs."""
    x = np.random.default_rng(num_columns).normal(size=(6, num_columns)).astype(np.float32)
    x[0, [num_columns // 2, num_columns - 1]] = 9
    x[1] = -np.inf
    x[2, [num_columns // 3, num_columns // 2]] = np.nan
    x[3, [num_columns // 4, num_columns - 2]] = np.inf
    x[4] = 0
    x[4, num_columns // 5 :] = -0.0
    x[5, num_columns - 1] = 7
    return case_of(op, x, 0, split)


def case_of(op: RowOp, x: np.ndarray, extra: int, split: bool) -> Problem:
    """These rows in wider ones."""
    num_rows, num_columns = x.shape
    outputs = {"out": Output((num_rows,), np.int32 if op == "argmax" else np.float32)}
    scratch = {}
    if split:
        outputs["counters"] = Output((num_rows,), np.int32, holds_zeros=True)
        scratch["partials"] = Output((num_rows, 2 * MAX_SPLITS))

    def reference() -> dict[str, Expected]:
        counters = {"counters": Expected(np.zeros(num_rows), 0.0)} if split else {}  # 0 again afterwards
        return {"out": _reduced(op, x), **counters}

    def solve(device: Device, arrays: Arrays) -> None:
        workspace = {name: arrays.get(name) for name in ("partials", "counters")}
        row_reduce(device, op=op, x=arrays["x"][:, :num_columns], out=arrays["out"], **workspace)

    return Problem(
        "row_reduce",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"x": widened(x, extra)},
        outputs=outputs,
        reference=reference,
        cost=row_reduce_cost(num_rows=num_rows, num_columns=num_columns),
        scratch=scratch,
        solvers={ENGINE: solve},
        label=f"{op} split" if split else op,
    )


def masked_case(split: bool) -> Problem:
    """The logarithm of the sum of rows in which all, most or some columns are -inf, and of one with a NaN."""
    x = np.random.default_rng(5).normal(size=(4, 20000)).astype(np.float32)
    x[0] = -np.inf
    x[1, 10:] = -np.inf
    x[2, :19990] = -np.inf
    x[3, 777] = np.nan
    return case_of("log_sum_exp", x, 0, split)


def _log_sum_exp(x: np.ndarray) -> Expected:
    """Allow fp32, in any order of any parts."""
    wide = x.astype(np.float64)
    maximum = wide.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):  # rows of -inf
        powers = np.where(np.isneginf(wide), 0.0, np.exp(wide - maximum))
        total = powers.sum(axis=1, keepdims=True)
        values = (maximum + np.log(total))[:, 0]
        # x - max is rounded before it is raised; each of at most a dozen new maxima costs 5 roundings.
        distances = powers * np.where(np.isneginf(wide), 0.0, maximum - wide)
        distance = distances.sum(axis=1, keepdims=True) / total
        num_terms = np.isfinite(wide).sum(axis=1, keepdims=True)
        roundings = 3 * (np.abs(maximum) + np.abs(np.log(total))) + 2 * distance + np.sqrt(num_terms) + 64
    return Expected(values, np.where(np.isfinite(values), (EPSILON * roundings)[:, 0], 0.0))


def _reduced(op: RowOp, x: np.ndarray) -> Expected:
    wide = x.astype(np.float64)
    if op == "sum":
        values = wide.sum(axis=1)
        return Expected(values, sum_bound(values, np.abs(wide).sum(axis=1), x.shape[1], np.float32))
    if op == "log_sum_exp":
        return _log_sum_exp(x)
    return Expected(wide.max(axis=1) if op == "max" else wide.argmax(axis=1).astype(np.float64), 0.0)


def _checks() -> Iterator[Problem]:
    for op in OPS:
        for num_columns in (1, 7, 40, 1003, 1025, 14336):
            yield case(op, 5, num_columns, 3, split=False)
        for split in (False, True):
            yield case(op, 5, 8192, 0, split)
            yield case(op, 5, 32001, 15, split)
    specials: tuple[RowOp, ...] = ("max", "argmax")
    for split in (False, True):
        for op in specials:
            yield special_case(op, 9001, split)
        yield masked_case(split)


CASES = KernelCases("row_reduce", _checks, partial(case, "argmax", 1, 128256, 0, True))
