"""A plain copy: what it does not depend on is how threads share the elements, and that is what it measures."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind


def make(n: int, stride: int = 1) -> Problem:
    """out = x. `stride` says how far apart the elements of neighbouring threads lie, for kernels that ask for it.

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
