"""GELU of rows after a bias, by the formula with tanh. Source: arXiv 1606.08415, section 2."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24


def make(num_rows: int, num_columns: int) -> Problem:
    """out = y / 2 * (1 + tanh(sqrt(2 / pi) * (y + 0.044715 * y^3))), y = x + bias.

    Shapes: x, out [num_rows, num_columns]; bias [num_columns]; all float32; y and t as x, scratch
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = 2 * generator.standard_normal((num_rows, num_columns), dtype=np.float32)
    bias = generator.standard_normal(num_columns, dtype=np.float32)

    def reference() -> dict[str, Expected]:
        y = x.astype(np.float64) + bias
        values = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        # Rounding y moves the result by up to 1.13 roundings of y. 1 + tanh has an absolute error: 2 roundings of tanh
        # itself, up to 4 of its argument (9 of it, times its slope), one of the sum; half of them count, for |y|. Then
        # two products.
        return {"out": Expected(values, _ROUNDING * (5 * np.abs(y) + 2 * np.abs(values)))}

    count = num_rows * num_columns
    return Problem(
        "bias_gelu",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "bias": bias},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(read_bytes=4 * (count + num_columns), written_bytes=4 * count, flops=10 * count),
        scratch={"y": Output(x.shape), "t": Output(x.shape)},
    )


BIAS_GELU = ProblemKind("bias_gelu", "GELU of rows after a bias", make)
