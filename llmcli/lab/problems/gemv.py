"""A matrix of halves times one row of activations."""

from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import gemv
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout
from llmcli.lab.matrices import tile_rows
from llmcli.lab.notes import matmul
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.matmul import expected_product


def make(num_rows: int, num_columns: int) -> Problem:
    """out = weight @ x.

    x has values of halves, so that the library, which takes x_half, and the engine, which splits x, are exact too.
    Shapes: weight float16 [num_rows, num_columns], and as `tiles`; x float32 and x_half float16 [num_columns]; out
            float32 [num_rows]
    """
    generator = np.random.default_rng([num_rows, num_columns])
    weight = generator.standard_normal((num_rows, num_columns), dtype=np.float32).astype(np.float16)
    x_half = generator.standard_normal(num_columns, dtype=np.float32).astype(np.float16)
    layout = tile_layout("float16", num_rows, num_columns)

    def reference() -> dict[str, Expected]:
        expected = expected_product(x_half[np.newaxis].astype(np.float64), weight.T.astype(np.float64))
        return {"out": Expected(expected.values[0], np.asarray(expected.bound)[0])}

    return Problem(
        "gemv",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={
            "weight": weight,
            "tiles": tile_rows(layout, weight),
            "x": x_half.astype(np.float32),
            "x_half": x_half,
        },
        outputs={"out": Output((num_rows,))},
        reference=reference,
        cost=KernelCost(
            read_bytes=2 * num_rows * num_columns + 4 * num_columns,
            written_bytes=4 * num_rows,
            flops=2 * num_rows * num_columns,
        ),
        solvers={ENGINE: partial(_solve, layout), "cublas": _solve_by_library},
    )


def _solve(layout: TileLayout, device: Device, arrays: Arrays) -> None:
    matrix = TiledMatrix(layout, arrays["tiles"], None, None)
    gemv(device, matrix=matrix, x=arrays["x"].reshape(1, -1), out=arrays["out"].reshape(1, -1))


def _solve_by_library(device: Device, arrays: Arrays) -> None:
    x, out = arrays["x_half"].reshape(1, -1), arrays["out"].reshape(1, -1)
    matmul(device, x=x, weight=arrays["weight"], out=out)


GEMV = ProblemKind("gemv", "a matrix of halves times one row", make)
