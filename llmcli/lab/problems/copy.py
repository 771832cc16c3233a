"""A plain copy: its result does not depend on how threads share the elements, but its time does."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind


def make(n: int, stride: int = 1) -> Problem:
    """out = x. `stride` is the distance of the elements of neighbouring threads, for kernels that use it.

    Shapes: x, out [n] float32
    """
    x = np.random.default_rng(n).random(n, np.float32)
    return Problem(
        "copy",
        {"n": n, "stride": stride},
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=lambda: {"out": Expected(x.astype(np.float64), 0.0)},
        cost=KernelCost(read_bytes=4 * n, written_bytes=4 * n, flops=0),
    )


COPY = ProblemKind("copy", "a copy of an array", make)
