"""Kernels that compute each element of a row from few others: sums, scales, activations, roundings, copies."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels import elementwise
from llmcli.kernels.device import Device
from llmcli.kernels.stage_wide import image_bytes
from llmcli.lab.matrices import STORAGE, StoredMatrix, matrix_of, storage_name, tiles_of, to_storage
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
from llmcli.lab.row_kernels import SWIGLU_SPEC, swiglu, swiglu_cost
from llmcli.lab.rows import COLUMNS, image_of, make_rows, powers_of_two, rounded_rows, widened


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
        cost=elementwise.add_parts_cost(num_parts=num_parts, size=num_rows * num_columns),
        solvers=by_engine(elementwise.add_parts, "parts", "out"),
    )


ADD_PARTS = KernelCases(
    "add_parts",
    lambda: (add_parts_case(parts, *shape) for parts in (1, 3, 4, 5, 7, 8) for shape in ((6, 1028), (3, 21))),
    partial(add_parts_case, 3, 256, 4096),
)


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
        SWIGLU_SPEC.stem,
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
    SWIGLU_SPEC.stem,
    lambda: (
        swiglu_case(num_rows, num_columns, extra, dtype)
        for num_columns in COLUMNS
        for dtype in STORAGE
        for num_rows, extra in ((5, 3), (6, 16))
    ),
    partial(swiglu_case, 1, 14336, 0, np.float16),
)


def gather_columns_case(num_rows: int, num_columns: int, unit_inputs: int = 0) -> Problem:
    """Rows with gaps between them, or an image, whose columns come in a random order: bits do not change."""
    x = np.clip(make_rows(num_rows, num_columns), -6e4, 6e4).astype(np.float16)
    order = np.random.default_rng(num_columns).permutation(num_columns).astype(np.int32)
    sorted_x = np.take(x, order, axis=1)
    shape = (image_bytes(num_columns, num_rows) // 2,) if unit_inputs else x.shape

    def reference() -> dict[str, Expected]:
        values = stored_values(sorted_x)
        return {"out": Expected(image_of(values, unit_inputs, np.float64) if unit_inputs else values, 0.0)}

    def solve(device: Device, arrays: Arrays) -> None:
        x, order, out = arrays["x"], arrays["order"], arrays["out"]
        if unit_inputs:
            images = {"image": x.view(np.uint8), "out": out.view(np.uint8)}
            elementwise.gather_image(device, order=order, unit_inputs=unit_inputs, rows=num_rows, **images)
        else:
            elementwise.gather_columns(device, x=x[:, :num_columns], order=order, out=out)

    return Problem(
        "gather_columns",
        {"num_rows": num_rows, "num_columns": num_columns, "unit_inputs": unit_inputs},
        inputs={"x": image_of(x, unit_inputs) if unit_inputs else widened(x, 8), "order": order},
        outputs={"out": Output(shape, np.float16, holds_zeros=bool(unit_inputs))},  # of its tokens none lacks
        reference=reference,
        cost=elementwise.gather_columns_cost(num_rows=num_rows, num_columns=num_columns),
        solvers={ENGINE: solve},
    )


GATHER_COLUMNS = KernelCases(
    "gather_columns",
    lambda: (
        gather_columns_case(num_rows, num_columns, unit_inputs)
        for num_columns in COLUMNS
        for num_rows, unit_inputs in ((6, 0), (3, 64), (130, 128))
    ),
    partial(gather_columns_case, 8, 4096),
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
    stored = StoredMatrix(storage_name(table.dtype), table)

    def solve(device: Device, arrays: Arrays) -> None:
        table, given = matrix_of(stored.layout, arrays), (arrays["token_ids"], arrays.get("rows"))
        elementwise.embedding(device, table=table, token_ids=given[0], rows=given[1], out=arrays["out"])

    return Problem(
        "embedding",
        {"num_tokens": num_tokens, "hidden_size": hidden_size},
        inputs={"tiles": tiles_of(stored).tiles, **inputs},
        outputs={"out": Output((num_tokens, hidden_size))},
        reference=lambda: {"out": Expected(values(), 0.0)},
        cost=elementwise.embedding_cost(num_tokens=num_tokens, hidden_size=hidden_size, itemsize=table.dtype.itemsize),
        solvers={ENGINE: solve},
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
