"""SwiGLU of rows. Source: arXiv 2002.05202, equation 5."""

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.swiglu import swiglu, swiglu_cost
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24


def make(num_rows: int, num_columns: int) -> Problem:
    """out = gate / (1 + exp(-gate)) * up.

    `gate_up` has a row's gate, then its up. `gate_up_tiles` has 8 columns of each in turn, as the engine's products
    write them.
    Shapes: gate_up [num_rows, 2 * num_columns]; gate_up_tiles [num_rows, 16 * ceil(num_columns / 8)]; row_scale
            [num_rows], ones; out and activated (scratch) [num_rows, num_columns]; out_scale [num_rows], scratch; all
            float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    gate, up = generator.standard_normal((2, num_rows, num_columns), dtype=np.float32)
    gate *= 3

    def reference() -> dict[str, Expected]:
        wide = gate.astype(np.float64)
        values = wide / (1 + np.exp(-wide)) * up
        # The exponential within 2 ulp, a sum, a division, a product.
        return {"out": Expected(values, 8 * _ROUNDING * np.abs(values))}

    return Problem(
        "swiglu",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={
            "gate_up": np.concatenate([gate, up], axis=1),
            "gate_up_tiles": _in_turn(gate, up),
            "row_scale": np.ones(num_rows, np.float32),
        },
        outputs={"out": Output(gate.shape)},
        reference=reference,
        cost=swiglu_cost(num_rows=num_rows, num_columns=num_columns, itemsize=4),
        scratch={"activated": Output(gate.shape), "out_scale": Output((num_rows,))},
        solvers={ENGINE: _solve},
    )


def _in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """HALF_ROWS columns of gate and of up in turn, the last ones padded with zeros."""
    num_rows, num_columns = gate.shape
    tiles = np.zeros((num_rows, -(-num_columns // HALF_ROWS), TILE_ROWS), np.float32)
    place = np.arange(num_columns)
    tiles[:, place // HALF_ROWS, place % HALF_ROWS] = gate
    tiles[:, place // HALF_ROWS, place % HALF_ROWS + HALF_ROWS] = up
    return tiles.reshape(num_rows, -1)


def _solve(device: Device, arrays: Arrays) -> None:
    swiglu(
        device,
        gate_up=arrays["gate_up_tiles"],
        row_scale=arrays["row_scale"],
        out=arrays["out"],
        out_scale=arrays["out_scale"],
    )


SWIGLU = ProblemKind("swiglu", "SwiGLU of rows", make)
