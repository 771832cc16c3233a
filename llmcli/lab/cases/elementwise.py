"""Kernels that compute each element of a row from few others: sums, scales, activations, roundings, copies."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import (
    add_parts,
    add_parts_cost,
    embedding,
    embedding_cost,
    gather_columns,
    gather_columns_cost,
    swiglu,
    swiglu_cost,
)
from llmcli.kernels.norms import (
    residual_add,
    residual_add_cost,
    round_rows,
    round_rows_cost,
    scale_bias,
    scale_bias_cost,
)
from llmcli.lab.matrices import STORAGE, storage_name, to_storage
from llmcli.lab.problem import (
    ENGINE,
    ROUNDING,
    Arrays,
    Expected,
    KernelCases,
    Output,
    Problem,
    by_engine,
    stored_values,
)
from llmcli.lab.problems.activations import interleave
from llmcli.lab.rows import COLUMNS, make_rows, powers_of_two, rounded_rows, widened


def add_parts_case(num_parts: int, num_rows: int, num_columns: int) -> Problem:
    """Parts of every kind of rows, added to others one after the other: every bit is known."""
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
        solvers=by_engine(add_parts, "parts", "out"),
    )


ADD_PARTS = KernelCases(
    "add_parts",
    lambda: (add_parts_case(parts, *shape) for parts in (1, 3, 4, 5, 7, 8) for shape in ((6, 1028), (3, 21))),
    partial(add_parts_case, 3, 256, 4096),
)


def residual_add_case(num_rows: int, num_columns: int, extra: int, has_scale: bool, has_bias: bool) -> Problem:
    """A product, times a row's scale, plus a bias, added to the residual stream; it has `extra` columns more."""
    inputs = {
        "x": make_rows(num_rows, num_columns + extra),
        "before": make_rows(num_rows, num_columns, seed=1)[::-1].copy(),
        **_scale_and_bias(num_rows, num_columns, has_scale, has_bias),
    }

    def reference() -> dict[str, Expected]:
        added = _scaled_and_biased(inputs["x"][:, :num_columns], inputs)
        values = inputs["before"] + added
        return {"hidden": Expected(values, ROUNDING * (np.abs(values) * (1 + ROUNDING) + np.abs(added)))}

    return Problem(
        "residual_add",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs=inputs,
        outputs={"hidden": Output((num_rows, num_columns), initial="before")},
        reference=reference,
        cost=residual_add_cost(num_rows=num_rows, num_columns=num_columns, has_bias=has_bias),
        solvers=by_engine(residual_add, "x", "row_scale", "bias", "hidden"),
        label=_scale_and_bias_name(has_scale, has_bias),
    )


RESIDUAL_ADD = KernelCases(
    "residual_add",
    lambda: (
        residual_add_case(num_rows, num_columns, extra, has_scale, has_bias)
        for num_columns in COLUMNS
        for num_rows, extra, has_scale, has_bias in ((6, 16, True, True), (5, 5, True, False), (1, 0, False, False))
    ),
    partial(residual_add_case, 16, 4096, 0, True, False),
)


def scale_bias_case(num_rows: int, num_columns: int, extra: int, has_scale: bool, has_bias: bool) -> Problem:
    """Rows times their scales plus a bias, in place, in a wider buffer whose other columns do not change."""
    inputs = {
        "before": make_rows(num_rows, num_columns + extra),
        **_scale_and_bias(num_rows, num_columns, has_scale, has_bias),
    }

    def reference() -> dict[str, Expected]:
        values = inputs["before"].astype(np.float64)
        bound = np.zeros_like(values)
        values[:, :num_columns] = _scaled_and_biased(values[:, :num_columns], inputs)
        bound[:, :num_columns] = ROUNDING * np.abs(values[:, :num_columns])
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
        label=_scale_and_bias_name(has_scale, has_bias),
    )


SCALE_BIAS = KernelCases(
    "scale_bias",
    lambda: (
        scale_bias_case(num_rows, num_columns, extra, has_scale, has_bias)
        for num_columns in COLUMNS
        for num_rows, extra, has_scale, has_bias in ((6, 16, True, True), (5, 5, True, False), (1, 0, False, True))
    ),
    partial(scale_bias_case, 16, 6144, 0, True, True),
)


def _scale_and_bias(num_rows: int, num_columns: int, has_scale: bool, has_bias: bool) -> dict[str, np.ndarray]:
    inputs = {"row_scale": powers_of_two(num_rows)} if has_scale else {}
    if has_bias:
        inputs["bias"] = np.random.default_rng(3).normal(size=num_columns).astype(np.float32)
    return inputs


def _scaled_and_biased(x: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    values = x.astype(np.float64)
    if "row_scale" in inputs:
        values = values * inputs["row_scale"][:, None]
    return values + inputs["bias"] if "bias" in inputs else values


def _scale_and_bias_name(has_scale: bool, has_bias: bool) -> str:
    return " ".join(name for name, given in (("scale", has_scale), ("bias", has_bias)) if given)


def swiglu_case(num_rows: int, num_columns: int, extra: int, dtype: Any) -> Problem:
    """silu(gate) * up of products whose tiles hold eight columns of gate and eight of up.

    Rows of every kind, gates from -80 on, `extra` columns between one row and the next.
    """
    up = make_rows(num_rows, num_columns)
    gate = np.random.default_rng(num_columns).normal(scale=4, size=up.shape).astype(np.float32)
    gate[0, :: max(1, num_columns // 5)] = -80
    scale = powers_of_two(num_rows)

    def reference() -> dict[str, Expected]:
        gate64, up64 = (values.astype(np.float64) * scale[:, None] for values in (gate, up))
        # exp: 1 ulp, or __expf's 2 + 1.173 |g|; an ulp is 2 roundings. Sum, quotient (2 ulp), two products: 7 more.
        exponential = 2 if dtype == np.float32 else 2 * (2 + 1.173 * np.abs(gate64))
        # Below -87, where it is less than 2^-118, silu may be 0.
        lost = np.where(gate64 < -87, 2.0**-118, 0.0) * np.abs(up64)
        out, out_scale = rounded_rows(swiglu_of(gate64, up64), dtype, (exponential + 7) * ROUNDING, lost)
        return {"out": out, "out_scale": out_scale}

    return Problem(
        "swiglu",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"gate_up": widened(interleave(gate, up, np.nan), extra), "row_scale": scale},
        outputs={"out": Output(up.shape, dtype), "out_scale": Output((num_rows,))},
        reference=reference,
        cost=swiglu_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers=by_engine(swiglu, "gate_up", "row_scale", "out", "out_scale"),
        label=storage_name(dtype),
    )


def swiglu_of(gate: np.ndarray, up: np.ndarray | float) -> np.ndarray:
    """silu(gate) * up in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)) * up)


SWIGLU = KernelCases(
    "swiglu",
    lambda: (
        swiglu_case(num_rows, num_columns, extra, dtype)
        for num_columns in COLUMNS
        for dtype in STORAGE
        for num_rows, extra in ((5, 3), (6, 16))
    ),
    partial(swiglu_case, 1, 14336, 0, np.float16),
)


def gather_columns_case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """Rows with gaps between them, whose columns come in a random order: bits do not change."""
    x = np.clip(make_rows(num_rows, num_columns), -6e4, 6e4).astype(dtype)
    order = np.random.default_rng(num_columns).permutation(num_columns).astype(np.int32)

    def solve(device: Device, arrays: Arrays) -> None:
        gather_columns(device, x=arrays["x"][:, :num_columns], order=arrays["order"], out=arrays["out"])

    return Problem(
        "gather_columns",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": widened(x, 8), "order": order},
        outputs={"out": Output(x.shape, dtype)},
        reference=lambda: {"out": Expected(np.take(stored_values(x), order, axis=1), 0.0)},
        cost=gather_columns_cost(num_rows=num_rows, num_columns=num_columns, itemsize=x.dtype.itemsize),
        solvers={ENGINE: solve},
        label=storage_name(dtype),
    )


GATHER_COLUMNS = KernelCases(
    "gather_columns",
    lambda: (gather_columns_case(6, num_columns, dtype) for num_columns in COLUMNS for dtype in STORAGE[:2]),
    partial(gather_columns_case, 8, 4096, np.float32),
)


def round_rows_case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """Rows of every kind in a storage type, with a power of two a row: rounded once, so every bit is known."""
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
        solvers=by_engine(round_rows, "x", "out", "row_scale"),
        label=storage_name(dtype),
    )


ROUND_ROWS = KernelCases(
    "round_rows",
    lambda: (round_rows_case(6, num_columns, dtype) for num_columns in COLUMNS for dtype in STORAGE),
    partial(round_rows_case, 16, 4096, np.float16),
)


def embedding_case(num_tokens: int, hidden_size: int, dtype: Any, vocab_size: int = 61) -> Problem:
    """The vectors of tokens, out of a table: ids of the whole table, its ends included."""
    generator = np.random.default_rng(hidden_size)
    table = to_storage(generator.normal(size=(vocab_size, hidden_size)), dtype)
    ids = generator.integers(0, vocab_size, num_tokens).astype(np.int32)
    ids[0], ids[-1] = vocab_size - 1, 0
    return _embedding(table, {"token_ids": ids}, lambda: stored_values(table)[ids], storage_name(dtype))


def unknown_ids_case(hidden_size: int) -> Problem:
    """Ids outside the table give NaN, and read nothing."""
    table = np.arange(3 * hidden_size, dtype=np.float32).reshape(3, hidden_size)
    ids = np.array([2, -1, 3, 2**31 - 1, -(2**31), 0], np.int32)

    def values() -> np.ndarray:
        expected = np.full((len(ids), hidden_size), np.nan)
        expected[[0, 5]] = table[[2, 0]]
        return expected

    return _embedding(table, {"token_ids": ids}, values, "unknown ids")


def rows_case(hidden_size: int) -> Problem:
    """Ids of rows; row -1 gives zeros."""
    table = np.arange(5 * hidden_size, dtype=np.float32).reshape(5, hidden_size) + 1
    inputs = {"token_ids": np.array([3, 99, 1, 4], np.int32), "rows": np.array([2, -1, 0, 3, 2, -1], np.int32)}

    def values() -> np.ndarray:
        expected = np.zeros((6, hidden_size))
        expected[[0, 2, 3, 4]] = table[[1, 3, 4, 1]]
        return expected

    return _embedding(table, inputs, values, "rows")


def _embedding(table: np.ndarray, inputs: dict[str, np.ndarray], values: Any, label: str) -> Problem:
    num_tokens, hidden_size = len(inputs.get("rows", inputs["token_ids"])), table.shape[1]
    return Problem(
        "embedding",
        {"num_tokens": num_tokens, "hidden_size": hidden_size},
        inputs={"table": table, **inputs},
        outputs={"out": Output((num_tokens, hidden_size))},
        reference=lambda: {"out": Expected(values(), 0.0)},
        cost=embedding_cost(num_tokens=num_tokens, hidden_size=hidden_size, itemsize=table.dtype.itemsize),
        solvers=by_engine(embedding, "table", "token_ids", "rows", "out"),
        label=label,
    )


def _embedding_checks() -> Iterator[Problem]:
    for hidden_size in (1, 7, 172, 1030, 4096, 9001):
        for dtype in STORAGE:
            yield embedding_case(5, hidden_size, dtype)
    for hidden_size in (7, 64):
        yield unknown_ids_case(hidden_size)
        yield rows_case(hidden_size)


EMBEDDING = KernelCases("embedding", _embedding_checks, partial(embedding_case, 1, 4096, np.float16, 4000))
