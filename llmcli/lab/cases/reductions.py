"""Kernels that reduce a row to few numbers, or need such a number for each element: sums, softmax, norms."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels import read_bandwidth as kernel
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.lab.matrices import STORAGE, storage_name
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, KernelCases, Output, Problem, by_engine
from llmcli.lab.problems.rows import EPS, rms_normed
from llmcli.lab.row_kernels import (
    MAX_SPLITS,
    RMS_NORM_SPEC,
    ROW_REDUCE_SPEC,
    SOFTMAX_SPEC,
    RowOp,
    rms_norm,
    rms_norm_cost,
    row_reduce,
    row_reduce_cost,
    softmax,
    softmax_cost,
)
from llmcli.lab.rows import COLUMNS, make_rows, rounded_rows, sum_bound, widened

OPS: tuple[RowOp, ...] = ("sum", "max", "argmax", "log_sum_exp")


def row_reduce_case(op: RowOp, num_rows: int, num_columns: int, extra: int, split: bool) -> Problem:
    """Rows of every kind in wider ones; with `split` there is a workspace for the form of few long rows."""
    return _row_reduce(op, make_rows(num_rows, num_columns), extra, split)


def row_reduce_specials_case(op: RowOp, num_columns: int, split: bool) -> Problem:
    """Ties, rows of -inf, of NaN, of +inf and of zeros of both signs."""
    x = np.random.default_rng(num_columns).normal(size=(6, num_columns)).astype(np.float32)
    x[0, [num_columns // 2, num_columns - 1]] = 9
    x[1] = -np.inf
    x[2, [num_columns // 3, num_columns // 2]] = np.nan
    x[3, [num_columns // 4, num_columns - 2]] = np.inf
    x[4] = 0
    x[4, num_columns // 5 :] = -0.0
    x[5, num_columns - 1] = 7
    return _row_reduce(op, x, 0, split)


def _row_reduce(op: RowOp, x: np.ndarray, extra: int, split: bool) -> Problem:
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
        ROW_REDUCE_SPEC.stem,
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"x": widened(x, extra)},
        outputs=outputs,
        reference=reference,
        cost=row_reduce_cost(num_rows=num_rows, num_columns=num_columns),
        scratch=scratch,
        solvers={ENGINE: solve},
        label=f"{op} split" if split else op,
    )


def row_reduce_masked_case(split: bool) -> Problem:
    """The logarithm of the sum of rows in which all, most or some columns are -inf, and of one with a NaN."""
    x = np.random.default_rng(5).normal(size=(4, 20000)).astype(np.float32)
    x[0] = -np.inf
    x[1, 10:] = -np.inf
    x[2, :19990] = -np.inf
    x[3, 777] = np.nan
    return _row_reduce("log_sum_exp", x, 0, split)


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
    return Expected(values, np.where(np.isfinite(values), (ROUNDING * roundings)[:, 0], 0.0))


def _reduced(op: RowOp, x: np.ndarray) -> Expected:
    wide = x.astype(np.float64)
    if op == "sum":
        values = wide.sum(axis=1)
        return Expected(values, sum_bound(values, np.abs(wide).sum(axis=1), x.shape[1], np.float32))
    if op == "log_sum_exp":
        return _log_sum_exp(x)
    return Expected(wide.max(axis=1) if op == "max" else wide.argmax(axis=1).astype(np.float64), 0.0)


def _row_reduce_checks() -> Iterator[Problem]:
    for op in OPS:
        for num_columns in (1, 7, 40, 1003, 1025, 14336):
            yield row_reduce_case(op, 5, num_columns, 3, split=False)
        for split in (False, True):
            yield row_reduce_case(op, 5, 8192, 0, split)
            yield row_reduce_case(op, 5, 32001, 15, split)
    specials: tuple[RowOp, ...] = ("max", "argmax")
    for split in (False, True):
        for op in specials:
            yield row_reduce_specials_case(op, 9001, split)
        yield row_reduce_masked_case(split)


ROW_REDUCE = KernelCases(
    ROW_REDUCE_SPEC.stem, _row_reduce_checks, partial(row_reduce_case, "argmax", 1, 128256, 0, True)
)


def softmax_case(num_rows: int, num_columns: int, extra: int, log: bool) -> Problem:
    """Rows of every kind in wider ones."""
    return _softmax_case_of(make_rows(num_rows, num_columns), extra, log)


def softmax_masked_case(num_columns: int, log: bool) -> Problem:
    """Rows with columns of -inf, a row of only these, and one with a NaN."""
    x = np.random.default_rng(7).normal(scale=3, size=(5, num_columns)).astype(np.float32)
    x[0, : num_columns - 1] = -np.inf
    x[1, 5:] = -np.inf
    x[2, ::2] = -np.inf
    x[3] = -np.inf
    x[4, num_columns // 2] = np.nan
    return _softmax_case_of(x, 0, log)


def _softmax_case_of(x: np.ndarray, extra: int, log: bool) -> Problem:
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
        SOFTMAX_SPEC.stem,
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"x": widened(x, extra)},
        outputs={"out": Output((num_rows, num_columns + extra))},
        reference=reference,
        cost=softmax_cost(num_rows=num_rows, num_columns=num_columns),
        solvers={ENGINE: solve},
        label="log" if log else "",
    )


def _softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance, powers, total, of_sum = _softmax_parts(x)
    values = powers / total
    # Below the smallest normal number expf may give 0.
    roundings = 8 + np.where(powers > 0, distance, 0.0) + of_sum
    return values, np.nan_to_num(ROUNDING * roundings * values) + 2.0**-126


def _log_softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance, _, total, of_sum = _softmax_parts(x)
    values = -distance - np.log(total)
    with np.errstate(invalid="ignore"):
        bound = ROUNDING * (2 * np.abs(values) + distance + 2 * np.log(total) + of_sum)
    return values, np.where(np.isfinite(values), bound, 0.0)


def _softmax_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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


def _softmax_checks() -> Iterator[Problem]:
    for log in (False, True):
        for num_columns in (*COLUMNS, 32001):
            yield softmax_case(5, num_columns, 3, log)
            yield softmax_case(6, num_columns, 0, log)
        for num_columns in (40, 1003, 32001):
            yield softmax_masked_case(num_columns, log)


SOFTMAX = KernelCases(SOFTMAX_SPEC.stem, _softmax_checks, partial(softmax_case, 1, 128256, 0, False))


def rms_norm_case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """RMSNorm of rows of every kind, stored in any type with a power of two a row."""
    x = make_rows(num_rows, num_columns)
    generator = np.random.default_rng(num_columns)
    # Weights of 1e4 put rows above 2^15.
    weight = (generator.uniform(0.5, 2.0, num_columns) * generator.choice([-1, 1, 1e4], num_columns)).astype(np.float32)

    def reference() -> dict[str, Expected]:
        # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products.
        out, scale = rounded_rows(rms_normed(x, weight), dtype, (np.sqrt(num_columns) / 2 + 7) * ROUNDING)
        return {"out": out, "row_scale": scale}

    return Problem(
        RMS_NORM_SPEC.stem,
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape, dtype), "row_scale": Output((num_rows,))},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers=by_engine(rms_norm, "x", "weight", "out", "row_scale", eps=float(EPS)),
        label=storage_name(dtype),
    )


RMS_NORM = KernelCases(
    RMS_NORM_SPEC.stem,
    lambda: (rms_norm_case(6, num_columns, dtype) for num_columns in COLUMNS for dtype in STORAGE),
    partial(rms_norm_case, 1, 4096, np.float16),
)


def read_bandwidth_case(num_bytes: int, num_blocks: int) -> Problem:
    """Random bytes, combined by exclusive or.

    The blocks take turns, each with BLOCK_BYTES at a time; one without any writes zero.
    """
    memory = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)

    def reference() -> dict[str, Expected]:
        num_rounds = -(-num_bytes // (num_blocks * kernel.BLOCK_BYTES))
        padded = np.zeros(num_rounds * num_blocks * kernel.BLOCK_BYTES, np.uint8)
        padded[:num_bytes] = memory
        words = padded.view(np.uint32).reshape(num_rounds, num_blocks, -1)
        return {"sums": Expected(np.bitwise_xor.reduce(words, axis=(0, 2)).astype(np.float64), 0.0)}

    return Problem(
        "read_bandwidth",
        {"num_bytes": num_bytes, "num_blocks": num_blocks},
        inputs={"memory": memory},
        outputs={"sums": Output((num_blocks,), np.uint32)},
        reference=reference,
        cost=kernel.read_bandwidth_cost(num_bytes, num_blocks),
        solvers=by_engine(kernel.read_bandwidth, "memory", "sums"),
    )


READ_BANDWIDTH = KernelCases(
    "read_bandwidth",
    lambda: (
        read_bandwidth_case(num_bytes, num_blocks)
        for num_bytes in (16, kernel.BLOCK_BYTES, 3 * kernel.BLOCK_BYTES - 16, 5_000_016)
        for num_blocks in (1, 3, 528)
    ),
    lambda: read_bandwidth_case(256 * 2**20, TYPICAL_CARD.num_multiprocessors * kernel.BLOCKS_PER_MULTIPROCESSOR),
)
