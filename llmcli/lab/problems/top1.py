"""The largest logit of every row, and its column: the choice of greedy decoding."""

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.reductions import MAX_SPLITS, row_reduce
from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

NUM_PARTS = 32  # of a row that several blocks share
_NUM_TIES = 3


def make(num_rows: int, num_columns: int) -> Problem:
    """value[t] = max_i x[t, i], index[t] the lowest i that has it. Most rows have their largest value several times.

    Shapes: x [num_rows, num_columns] float32; value [num_rows] float32; index [num_rows] int32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns), np.float32)
    places = generator.integers(num_columns, size=(num_rows, _NUM_TIES))
    np.put_along_axis(x, places, x.max(axis=1, keepdims=True) + np.float32(0.5), axis=1)

    def reference() -> dict[str, Expected]:
        return {
            "value": Expected(x.max(axis=1).astype(np.float64), 0.0),
            "index": Expected(x.argmax(axis=1).astype(np.float64), 0.0),
        }

    return Problem(
        "top1",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x},
        outputs={"value": Output((num_rows,)), "index": Output((num_rows,), np.int32)},
        reference=reference,
        cost=KernelCost(4 * x.size, 8 * num_rows, x.size),
        scratch={
            "part_values": Output((num_rows, NUM_PARTS)),
            "part_indices": Output((num_rows, NUM_PARTS), np.int32),
            "partials": Output((num_rows, 2 * MAX_SPLITS)),
            "counters": Output((num_rows,), np.int32, holds_zeros=True),
        },
        solvers={ENGINE: _solve},
    )


def _solve(device: Device, arrays: Arrays) -> None:
    shared = {name: arrays[name] for name in ("x", "partials", "counters")}
    row_reduce(device, op="argmax", out=arrays["index"], **shared)
    row_reduce(device, op="max", out=arrays["value"], **shared)


TOP1 = ProblemKind("top1", "the largest of each row, and its column", make)
