"""silu(gate) * up, of products whose tiles hold eight columns of gate and eight of up."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import swiglu, swiglu_cost
from llmcli.lab.matrices import EPSILON, STORAGE, storage_name
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import COLUMNS, make_rows, powers_of_two, rounded_rows


def interleave(gate: np.ndarray, up: np.ndarray, extra: int = 0) -> np.ndarray:
    """Eight columns of gate, eight of up, and so on; padding of the last tile and `extra` columns are NaN."""
    num_rows, num_columns = gate.shape
    padded = -(-num_columns // 8) * 8
    tiles = np.full((2, num_rows, padded), np.nan, np.float32)
    tiles[0, :, :num_columns], tiles[1, :, :num_columns] = gate, up
    joined = tiles.reshape(2, num_rows, -1, 8).transpose(1, 2, 0, 3).reshape(num_rows, 2 * padded)
    return np.concatenate([joined, np.full((num_rows, extra), np.nan, np.float32)], axis=1)


def reference_of(gate: np.ndarray, up: np.ndarray | float) -> np.ndarray:
    """silu(gate) * up in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)) * up)


def case(num_rows: int, num_columns: int, extra: int, dtype: Any) -> Problem:
    """Rows of every kind, gates from -80 on, `extra` columns between one row and the next."""
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
        out, out_scale = rounded_rows(reference_of(gate64, up64), dtype, (exponential + 7) * EPSILON, lost)
        return {"out": out, "out_scale": out_scale}

    return Problem(
        "swiglu",
        {"num_rows": num_rows, "num_columns": num_columns, "extra": extra},
        inputs={"gate_up": interleave(gate, up, extra), "row_scale": scale},
        outputs={"out": Output(up.shape, dtype), "out_scale": Output((num_rows,))},
        reference=reference,
        cost=swiglu_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers={ENGINE: _solve},
        label=storage_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        for dtype in STORAGE:
            yield case(5, num_columns, 3, dtype)
            yield case(6, num_columns, 16, dtype)


def _solve(device: Device, arrays: Arrays) -> None:
    swiglu(device, **{name: arrays[name] for name in ("gate_up", "row_scale", "out", "out_scale")})


CASES = KernelCases("swiglu", _checks, partial(case, 1, 14336, 0, np.float16))
