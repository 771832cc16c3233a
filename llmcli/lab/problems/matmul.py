"""The product of two matrices of halves, with float32 sums."""

from functools import partial

import numpy as np

from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout
from llmcli.lab.matrices import tile_rows
from llmcli.lab.notes import matmul
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24


def make(num_rows: int, num_columns: int, num_inputs: int) -> Problem:
    """out = a @ b. Every rung reads halves and sums in float32, so one bound serves CUDA cores and tensor cores.

    `b_columns` and `tiles` are b again, in the form that the library and the engine read: each column contiguous.
    Shapes: a float16 [num_rows, num_inputs], b float16 [num_inputs, num_columns], b_columns float16 [num_columns,
            num_inputs]; tiles uint8; out float32 [num_rows, num_columns]; widened float16, scratch
    """
    generator = np.random.default_rng([num_rows, num_columns, num_inputs])
    a = generator.standard_normal((num_rows, num_inputs), dtype=np.float32).astype(np.float16)
    b = generator.standard_normal((num_inputs, num_columns), dtype=np.float32).astype(np.float16)
    b_columns = np.ascontiguousarray(b.T)
    layout = tile_layout("float16", num_columns, num_inputs)

    def reference() -> dict[str, Expected]:
        return {"out": expected_product(a.astype(np.float64), b.astype(np.float64))}

    return Problem(
        "matmul",
        {"num_rows": num_rows, "num_columns": num_columns, "num_inputs": num_inputs},
        inputs={"a": a, "b": b, "b_columns": b_columns, "tiles": tile_rows(layout, b_columns)},
        outputs={"out": Output((num_rows, num_columns))},
        reference=reference,
        cost=KernelCost(
            read_bytes=2 * (num_rows + num_columns) * num_inputs,
            written_bytes=4 * num_rows * num_columns,
            flops=2 * num_rows * num_columns * num_inputs,
        ),
        scratch={"widened": Output((layout.padded_rows, num_inputs), np.float16)},
        solvers={"cublas": _solve_by_library, ENGINE: partial(_solve, layout)},
    )


def expected_product(a: np.ndarray, b: np.ndarray) -> Expected:
    """a @ b, and how far float32 sums may be from it; products are exact.

    A sum of n terms is rounded n times, up and down alike: sqrt(n) roundings, each of at most the sum of the terms'
    sizes. Tensor cores cut off instead, twice as much and always towards zero, but once for 8 terms, of a sum that is
    smaller than that by about sqrt(n) / 4. The last 4 are for short sums, and for roundings after the sum.
    Shapes: a float64 [m, n], b float64 [n, k]
    """
    return Expected(a @ b, (np.sqrt(a.shape[1]) + 4) * _ROUNDING * (np.abs(a) @ np.abs(b)))


def _solve_by_library(device: Device, arrays: Arrays) -> None:
    matmul(device, x=arrays["a"], weight=arrays["b_columns"], out=arrays["out"])


def _solve(layout: TileLayout, device: Device, arrays: Arrays) -> None:
    matrix = TiledMatrix(layout, arrays["tiles"], None, None)
    widened = arrays["widened"]
    dequantize(device, matrix=matrix, first_tile=0, num_tiles=layout.num_tiles, out=widened)
    matmul(device, x=arrays["a"], weight=widened[: layout.num_rows], out=arrays["out"])


MATMUL = ProblemKind("matmul", "product of two matrices of halves", make)
